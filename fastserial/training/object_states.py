"""From the user's objects to their states, and back.

An object has `state_dict` and `load_state_dict`, as modules, optimizers and schedulers have. It may
be in dictionaries, lists and tuples, at any depth.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch

from fastserial.errors import ConfigError, LoadMismatchError
from fastserial.nests import (
    is_container,
    is_object,
    items_of,
    rebuilt,
    sequence_like,
    shown,
    walk,
)
from fastserial.overlap.guard import storages_of_optimizer
from fastserial.overlap.watch import all_storages
from fastserial.training.wrapped import plain, state_of_module, state_to_module

_MIXED = (
    "Other objects may be restored already: resume from another checkpoint, or create them again, "
    "before you use them"
)


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
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            kind, rest = "a module", ". A copy that is no object's (an average) goes as dict(...)"
        elif type(value) is dict and value.keys() == {"state", "param_groups"}:
            kind, rest = "an optimizer", ""
        else:
            continue
        raise ConfigError(
            f"{shown(path)} in `state` is the state_dict() of {kind}, which resume() could not put "
            f"back: pass the object, not its state_dict(){rest}"
        )


def _is_expanded(value: Any) -> bool:
    """Return whether elements of a tensor share memory (`expand`)."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(n > 1 and stride == 0 for n, stride in zip(value.shape, value.stride(), strict=True))


def steady(objects: Mapping[str, Any]) -> set[int]:
    """Return the identities of the storages that only optimizer steps change.

    These are the ones that optimizers own, except buffers, which a forward pass changes. All others
    may change at any time, as averages do.
    """
    storages: set[int] = set()
    buffers: set[int] = set()
    for _, value in walk(objects):
        if isinstance(value, torch.optim.Optimizer):
            storages.update(storages_of_optimizer(value))
        elif isinstance(value, torch.nn.Module):
            buffers.update(all_storages(value.buffers()))
    return storages - buffers


def expected_bytes(objects: Mapping[str, Any]) -> int:
    """Return the size of the states that optimizers will create in their first step (bytes)."""
    nbytes = 0
    for _, value in walk(objects):
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            each = 2 if "betas" in value.defaults else bool(value.defaults.get("momentum"))
            parameters = [one for group in value.param_groups for one in group["params"]]
            nbytes += each * sum(one.numel() * one.element_size() for one in parameters)
    return nbytes


# -- saving ------------------------------------------------------------------------------------


def states(value: Any, state_of: Callable[[Any], Any]) -> Any:
    """Return a nest with its objects replaced by their states; itself if it has none."""
    if is_object(value):
        return state_of(value)
    if not holds_objects(value):
        return value
    return rebuilt(value, lambda item: states(item, state_of))


def state_of(value: Any) -> Any:
    """Return the state of an object."""
    value = plain(value)
    return state_of_module(value) if isinstance(value, torch.nn.Module) else value.state_dict()


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
        elif isinstance(target, MutableMapping | list) or (isinstance(target, tuple) and target):
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
        if not holds and type(state) is not type(target):
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
    method: Any = type(target).load_state_dict
    torchs = str(getattr(method, "__module__", "")).partition(".")[0] == "torch"
    if torchs and not isinstance(state, Mapping):
        raise LoadMismatchError(
            f"{where} is of the type {type(state).__name__} in the file, not a state_dict. {_MIXED}"
        )
    try:
        if isinstance(target, torch.nn.Module):
            state_to_module(target, state, strict)
        else:
            target.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        if not torchs or type(error) not in (RuntimeError, ValueError):
            raise
        text = str(error).rstrip(" .")
        raise LoadMismatchError(f"{where} does not fit: {text}. {_MIXED}") from error
