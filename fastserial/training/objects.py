"""From the user's objects to their states and back: names, wrappers, and what may be restored.

An object has `state_dict` and `load_state_dict`, as modules, optimizers and schedulers have. It may
be in dictionaries, lists and tuples, at any depth. A module that `torch.compile` or DDP wraps has
the names of the module inside in a file.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from fastserial.checkpoints.own_loading import is_torchs, load_state, versions_in
from fastserial.errors import ConfigError, LoadMismatchError
from fastserial.interrupts import ours
from fastserial.nests import (
    is_container,
    is_object,
    items_of,
    replaced,
    sequence_like,
    shown,
    walk,
)
from fastserial.training.rank_values import refusal_of

_MIXED = (
    "Other objects may be restored already: resume from another checkpoint, or create them again, "
    "before you use them"
)


# -- wrappers ----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return the module inside of wrappers; other values unchanged."""
    while (name := _inner(value)) is not None:
        value = getattr(value, name)
    return value


def state_of_module(module: Module) -> Any:
    """Return `module.state_dict()` with the names of wrappers left out."""
    return _renamed(module.state_dict(), _wrappers(module), _outwards)


def state_to_module(module: Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a state of `state_of_module` into a module, which may be wrapped in another way.

    Args:
        strict: as `Module.load_state_dict`.

    Raises:
        LoadMismatchError: torch refuses it.
        Exception: of the user's own code.
    """
    load_state(module, _renamed(state, _wrappers(module), _inwards), strict)


def _inner(value: Any) -> str | None:
    """Return the attribute of a wrapper that is its module; None if it is not a wrapper."""
    if isinstance(value, DistributedDataParallel):
        return "module"
    if _is_activation_wrapper(value):
        return "_checkpoint_wrapped_module"
    return "_orig_mod" if type(value).__name__ == "OptimizedModule" else None


def _is_activation_wrapper(value: Any) -> bool:
    """Return whether a module is torch's `checkpoint_wrapper`, or its wrapper for offloading."""
    home: Any = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return home is not None and isinstance(value, home.ActivationWrapper)


@dataclass(frozen=True, slots=True)
class _Wrappers:
    """The prefixes of wrapped modules, without and with the wrapper; outer ones first.

    Attributes:
        paths: of modules, as `named_modules` and the versions in a state dict have them.
        keys: of a state dict, from which activation wrappers leave out their own names.
    """

    paths: list[tuple[str, str]]
    keys: list[tuple[str, str]]


def _wrappers(module: Module) -> _Wrappers:
    paths = []
    leaving_out = []
    for name, one in module.named_modules(remove_duplicate=False):
        if name and (attribute := _inner(one)) is not None:
            paths.append((f"{name}.", f"{name}.{attribute}."))
            if _is_activation_wrapper(one):
                leaving_out.append(paths[-1])
    keys = [tuple(_outwards(prefix, leaving_out) for prefix in pair) for pair in paths]
    return _Wrappers(paths, [(outside, inside) for outside, inside in keys if outside != inside])


def _outwards(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return a name with wrappers left out."""
    for outside, inside in reversed(pairs):
        if name.startswith(inside):
            name = outside + name.removeprefix(inside)
    return name


def _inwards(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return a name with wrappers put in."""
    for outside, inside in pairs:
        if name.startswith(outside):
            name = inside + name.removeprefix(outside)
    return name


def _renamed(
    state: Any, wrappers: _Wrappers, rename: Callable[[str, Sequence[tuple[str, str]]], str]
) -> Any:
    """Return a state dict with other names, in the versions of its modules (`_metadata`), too."""
    if not wrappers.paths:
        return state
    renamed = copy.copy(state)
    renamed.clear()
    for name, value in state.items():
        renamed[rename(name, wrappers.keys)] = value
    versions = versions_in(state)
    if versions is not None:
        items = [(rename(f"{name}.", wrappers.paths)[:-1], one) for name, one in versions.items()]
        renamed._metadata = OrderedDict(items)
    return renamed


# -- what is saved ------------------------------------------------------------------------------


def holds_objects(value: Any) -> bool:
    """Return whether a value is an object, or a container with one in it."""
    return any(is_object(found) for _, found in walk(value))


def refuse_unrestorable(objects: Mapping[str, Any]) -> None:
    """Refuse what could be saved but not restored, such as a state instead of its object.

    Raises:
        ConfigError: a value is a module's or an optimizer's `state_dict()`, or an expanded tensor.
    """
    for path, value in walk(objects):
        if _is_expanded(value):
            raise ConfigError(
                f"{shown(path)} in `state` is an expanded tensor, into which resume() could not "
                "copy: pass its clone()"
            )
        if type(value) is OrderedDict and hasattr(value, "_metadata"):
            kind, rest = "a module", ". Pass a copy without an object (an average) as dict(...)"
        elif type(value) is dict and value.keys() == {"state", "param_groups"}:
            kind, rest = "an optimizer", ""
        else:
            continue
        raise ConfigError(
            f"{shown(path)} in `state` is the state_dict() of {kind}, which resume() could not "
            f"restore: pass the object, not its state_dict(){rest}"
        )


def _is_expanded(value: Any) -> bool:
    """Return whether elements of a tensor share memory (`expand`)."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(n > 1 and stride == 0 for n, stride in zip(value.shape, value.stride(), strict=True))


# -- saving ------------------------------------------------------------------------------------


def states(value: Any, state_of: Callable[[Any], Any]) -> Any:
    """Return a nest with its objects replaced by their states; itself if it has none."""
    return replaced(value, lambda one: state_of(one) if is_object(one) else one)


def state_of(value: Any) -> Any:
    """Return the state of an object."""
    value = plain(value)
    return state_of_module(value) if isinstance(value, torch.nn.Module) else value.state_dict()


def refused(state: Mapping[str, Any]) -> str:
    """Return what `resume` would refuse in a state, and the remedy; an empty string if nothing.

    Args:
        state: what is saved; of live optimizers, the groups and states are tested.
    """

    def tested(value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return [value.param_groups, list(value.state.values())]
        return None  # a module's tensors are no reason

    reasons = {name: refusal_of(states(value, tested)) for name, value in state.items()}
    found = "; ".join(
        f"{name}: {str(reason).splitlines()[0].rstrip('.')}"
        for name, reason in reasons.items()
        if reason
    )
    if not found:
        return ""
    return (
        f"resume() will refuse this checkpoint, as weights_only=True does not load all of it. "
        f"{found}. Keep plain values (`float(x)` for NumPy's) and tensors in it, allow what you "
        "trust by torch.serialization.add_safe_globals, or (one process) make the Checkpointer "
        "with weights_only=False"
    )


# -- restoring ---------------------------------------------------------------------------------


def restore(
    objects: Mapping[str, Any],
    found: Mapping[str, Any],
    path: str,
    only: Collection[str] | None = None,
    strict: bool = True,
) -> None:
    """Load states into the objects, values into the containers, tensors into the tensors.

    Errors of the user's own `load_state_dict` are raised unchanged.

    Args:
        only: names of the objects; None: all of them.
        strict: False: what the checkpoint lacks stays unchanged.

    Raises:
        LoadMismatchError: the checkpoint is of other objects.
    """
    wanted = [name for name in objects if only is None or name in only]
    missing = sorted(name for name in wanted if name not in found)
    if missing and strict:
        raise LoadMismatchError(f"{path}: it holds no state of {', '.join(missing)}")
    restoring = _Restoring(strict)
    for name in wanted:
        if name in missing:
            continue
        value = objects[name]
        new = restoring.restored(value, found[name], f"{path}: {name}")
        if new is value:
            continue
        if not isinstance(objects, MutableMapping):
            raise LoadMismatchError(
                f"{path}: {name} cannot be replaced: state is not a mutable mapping"
            )
        objects[name] = new


class _Restoring:
    """Loads states into values; `where` names the file and the entry, for errors."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        # The states of tensors and containers by the `id` of these: one that occurs twice cannot
        # have two states.
        self._done: dict[int, Any] = {}

    def restored(self, value: Any, state: Any, where: str, nested: bool = False) -> Any:
        """Load a state into a value and return the value, or what replaces it.

        Args:
            nested: the value is in a container: a tensor that does not fit is replaced.

        Raises:
            LoadMismatchError: it does not fit.
        """
        target = plain(value)
        if target is state:
            return value
        if is_object(target):
            _load(target, state, where, self._strict)
        elif self._done.setdefault(id(target), state) is not state:
            return state
        elif isinstance(target, torch.Tensor):
            if (problem := _objection(target, state, nested)) is not None:
                if nested:
                    return state
                raise LoadMismatchError(f"{where} {problem}. {_MIXED}")
            with torch.no_grad():
                target.copy_(state)
        elif is_container(target) and _can_be_refilled(target):
            return self._restored_container(target, state, where)
        else:
            return state
        return value

    def _restored_container(self, target: Any, state: Any, where: str) -> Any:
        """Load a container's state into it: it has the items of the file afterwards."""
        holds = holds_objects(target)
        mine = dict(items_of(target))
        theirs = dict(items_of(state)) if is_container(state) and not is_object(state) else {}
        if holds and mine.keys() != theirs.keys():
            only = ", ".join(repr(key) for key in mine.keys() ^ theirs.keys())
            raise LoadMismatchError(
                f"{where} has other items in the file than in the state; the difference: {only}. "
                f"{_MIXED}"
            )
        if not holds and not (type(state) is type(target) and is_container(state)):
            return state
        new = {
            key: self.restored(mine[key], item, f"{where}[{key!r}]", True) if key in mine else item
            for key, item in theirs.items()
        }
        if isinstance(target, MutableMapping):
            if new.keys() != mine.keys():
                target.clear()
            for key, item in new.items():
                target[key] = item
            return target
        items = list(new.values())
        if isinstance(target, list):
            target[:] = items
            return target
        same = len(items) == len(mine) and all(map(operator.is_, items, mine.values()))
        return target if same else sequence_like(target, items)


def _can_be_refilled(container: Any) -> bool:
    """Return whether items of a container can be replaced, or it has items of its own (a tuple)."""
    return isinstance(container, MutableMapping | list) or (
        isinstance(container, tuple) and len(container) > 0
    )


def _objection(target: torch.Tensor, state: Any, same_dtype: bool) -> str | None:
    """Return why a state cannot be copied into a tensor, None if it can."""
    if not isinstance(state, torch.Tensor):
        return f"is a tensor in the state, but {type(state).__name__} in the file"
    if target.shape != state.shape:
        return f"has the shape {tuple(state.shape)} in the file, not {tuple(target.shape)}"
    if same_dtype and target.dtype != state.dtype:
        return f"has the dtype {state.dtype} in the file, not {target.dtype}"
    return None


def _load(target: Any, state: Any, where: str, strict: bool) -> None:
    """Load an object's state; errors of torch's own code get the file and the entry."""
    torchs = is_torchs(target.load_state_dict)
    if torchs and not isinstance(state, Mapping):
        raise LoadMismatchError(
            f"{where} is of the type {type(state).__name__} in the file, not a state_dict. {_MIXED}"
        )
    try:
        if isinstance(target, torch.nn.Module):
            state_to_module(target, state, strict)
        else:
            target.load_state_dict(state)
    except ours(RuntimeError, ValueError) as error:
        kinds = (LoadMismatchError,) if isinstance(target, Module) else (RuntimeError, ValueError)
        if not torchs or type(error) not in kinds:
            raise
        text = str(error).rstrip(" .")
        raise LoadMismatchError(f"{where} does not fit: {text}. {_MIXED}") from error


# -- parts of a checkpoint -----------------------------------------------------------------------


class StateName(NamedTuple):
    """An entry of the state, or a key of a module in it; printed as `model.0.weight`."""

    entry: str
    key: str | None = None

    def __str__(self) -> str:
        return self.entry if self.key is None else f"{self.entry}.{self.key}"


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """What is to be restored.

    Attributes:
        state, per_rank: the values that are filled: common to all ranks, and each rank's own.
        only: the names to restore; None: all of them, and the random generators.
        strict: the file and the modules must have the same names.
        rename: prefixes of names in the file, and the prefixes here.
    """

    state: Mapping[str, Any]
    per_rank: Mapping[str, Any]
    only: Collection[str] | None = None
    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)

    @property
    def objects(self) -> dict[str, Any]:
        """The values of `state` that are filled."""
        return {name: value for name, value in self.state.items() if self.wants(name)}

    def wants(self, name: str) -> bool:
        """Return whether an entry is to be restored."""
        return self.only is None or name in self.only


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What `resume` did.

    Attributes:
        step: of the checkpoint; None if there was none.
        path: of its file.
        missing_keys: names that the file lacks; their values are unchanged.
        unexpected_keys: names in the file that the state does not have.
    """

    step: int | None = None
    path: str | None = None
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


class NameDifference(NamedTuple):
    """Names that the file lacks, and names in the file that the state does not have."""

    missing: list[StateName]
    unused: list[StateName]


def names_here(
    objects: Mapping[str, Any], state_of: Callable[[Any], Mapping[str, Any]] = state_of_module
) -> set[StateName]:
    """Return the names of what is filled; of modules, those of the keys in their state."""
    found: set[StateName] = set()
    for entry, value in objects.items():
        module = plain(value)
        keys = state_of(module) if isinstance(module, Module) else (None,)
        found.update(StateName(entry, key) for key in keys)
    return found


def names_in(value: Mapping[str, Any]) -> list[StateName]:
    """Return the names of what a file holds; of dictionaries with string keys, each key."""
    return [StateName(entry, key) for entry, item in value.items() for key in _keys(item)]


def _keys(value: Any) -> Iterable[str | None]:
    named = isinstance(value, Mapping) and value and all(type(key) is str for key in value)
    return value if named else (None,)


def difference(
    here: Collection[StateName], there: Collection[StateName], whole: bool
) -> NameDifference:
    """Compare what is filled with what the file holds, by the names that the state uses.

    Args:
        whole: entries of the file that are not in the state count as unused, too.
    """
    mine, theirs = {name.entry for name in here}, {name.entry for name in there}
    modules = {name.entry for name in here if name.key is not None}
    known = {*there, *map(StateName, theirs)}
    missing = [name for name in here if name not in known]
    unused = [name for name in there if name.entry in modules and name not in here]
    if whole:
        unused += [StateName(entry) for entry in theirs - mine]
    return NameDifference(sorted(missing, key=str), sorted(unused, key=str))


def renamed_name(name: StateName, rename: Mapping[str, str]) -> StateName:
    """Return the name here for a name in the file; the first rule that matches applies."""
    text = str(name)
    for old, new in rename.items():
        if text == old or text.startswith(f"{old}."):
            changed = new + text[len(old) :]
            return StateName(changed) if name.key is None else StateName(*changed.split(".", 1))
    return name


def renamed(found: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file holds under the names that the state uses."""
    made: dict[str, Any] = {}
    for entry, value in found.items():
        versions = versions_in(value)
        for key in _keys(value):
            new = renamed_name(StateName(entry, key), rename)
            if new.key is None:
                made[new.entry] = value if key is None else value[key]
                continue
            if new.entry not in made:
                made[new.entry] = copy.copy(value)
                made[new.entry].clear()
                if versions is not None:
                    made[new.entry]._metadata = OrderedDict()
            made[new.entry][new.key] = value[key]
        for part, version in (versions or {}).items():
            new = renamed_name(StateName(entry, part or None), rename)
            if (known := versions_in(made.get(new.entry))) is not None:
                known[new.key or ""] = version
    return made


def lacks_of_rank(path: str, names: Iterable[str]) -> LoadMismatchError:
    """Return the error for `per_rank` entries of this rank that a file lacks."""
    return LoadMismatchError(
        f"{path}: it has no {', '.join(names)} for this rank: it was saved by another number of "
        "ranks, or without these entries. resume(strict=False) leaves them unchanged"
    )
