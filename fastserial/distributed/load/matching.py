"""Compares a file with what is to be filled, key by key, before the first byte is read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from fastserial.checkpoints.own_loading import Conversion, is_scalar_for, why_not_filled
from fastserial.distributed.layout.file_index import FileTensor, is_plain_tuple
from fastserial.distributed.layout.placement import Holding, as_dtensor, holding, local_of
from fastserial.distributed.state.states import LiveState
from fastserial.distributed.state.walk import is_leaf, is_live, leaves
from fastserial.errors import LoadMismatchError
from fastserial.interrupts import ours
from fastserial.nests import Path, is_container, items_of, sequence_like, walk

_LISTS = (list, tuple)


class TensorMatch(NamedTuple):
    """A tensor of the file, and what this rank holds of it."""

    tensor: FileTensor
    held: Holding


@dataclass
class Match:
    """What a load does on this rank. Nothing is changed before `finish`.

    Attributes:
        tied: what shares its memory with what the file has is not missing.
        strict: what a module's own `load_state_dict` finds missing or unexpected is an error.
        jobs: what to read.
        missing: keys that the file lacks.
        problems: what cannot be loaded, and why.
        used: paths of the file; what lies below is used, too.
        offered: paths of the file that only a module's own `load_state_dict` may know, which gets
            them, unless another rank uses them (another stage of a pipeline).
    """

    rank: int
    ranks: Mapping[int, int]
    cast: bool
    tied: bool = False
    strict: bool = True
    nest: object = None
    modules: list[torch.nn.Module] = field(default_factory=list)
    jobs: list[TensorMatch] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    used: set[Path] = field(default_factory=set)
    offered: dict[Path, LiveState] = field(default_factory=dict)
    _absent: dict[str, Any] = field(default_factory=dict)
    _puts: list[Callable[[], None]] = field(default_factory=list)
    _live: list[LiveState] = field(default_factory=list)
    _meshes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    def compare(self, into: Any, there: Any, beside: object = None) -> None:
        """Compare all of what is to be filled with all that the file holds.

        Args:
            beside: a nest with the modules that name the parameters of optimizers; None: `into`.

        Raises:
            TypeError: it is nothing that could be filled.
        """
        if not (is_leaf(into) or is_live(into) or is_container(into)):
            raise TypeError(
                "load fills tensors, modules, optimizers, or dictionaries and lists of them, "
                f"not a {type(into).__name__}"
            )
        leaves(into)  # refuses what has a state of its own
        self.nest = into if beside is None else beside
        found = (one for _, one in walk(self.nest, once=True, objects=True))
        self.modules = [one for one in found if isinstance(one, torch.nn.Module)]
        if self._compare(into, there, ()) is not into:
            self.problems.append(f"{path_name(())}: a value in a tuple cannot be replaced")
        if self.tied:
            filled = {_spot(job.held.local) for job in self.jobs}
            self.missing = [
                name for name in self.missing if not _is_tied(self._absent.get(name), filled)
            ]

    def leave_out(self, used: Iterable[Path]) -> None:
        """Give no module's own `load_state_dict` what another rank uses."""
        if self.offered:
            begun = {path[:length] for path in used for length in range(len(path) + 1)}
            for path in begun & self.offered.keys():
                del self.offered[path].entries[path[-1]]

    def finish(self) -> None:
        """Set what is not a tensor's memory, once the bytes are read."""
        for job in self.jobs:
            local = job.held.local
            if not local.is_inference():
                torch.autograd.graph.increment_version(local)
        for put in self._puts:
            put()
        for one in self._live:
            one.apply(self.strict)

    # -- key by key ------------------------------------------------------------------------------

    def _compare(self, into: Any, there: Any, path: Path) -> Any:
        """Compare a value with the file's; return what replaces it once it is loaded."""
        if is_live(into):
            live = LiveState(into, self.modules, self.nest)
            self._live.append(live)
            self._compare_live(live, there, path)
        elif is_leaf(into):
            self.used.add(path)
            self._compare_tensor(into, there, path)
        elif path and _are_values(into, there):
            self.used.add(path)
            return self._replaced(into, there)
        elif is_container(into):
            return self._compare_container(into, there, path)
        else:
            self.used.add(path)
            return self._made(there, path)
        return into

    def _replaced(self, into: Any, there: Any) -> Any:
        """Take the file's container as it is, whatever is in ours; it stays the same object."""
        if isinstance(into, list):
            self._puts.append(lambda: into.__setitem__(slice(None), there))
        elif isinstance(into, MutableMapping):

            def refill() -> None:
                into.clear()
                for key, item in there.items():
                    into[key] = item

            self._puts.append(refill)
        else:
            return tuple(there) if type(into) is tuple else there
        return into

    def _compare_live(self, live: LiveState, there: Any, path: Path) -> None:
        if not live.is_optimizer:
            self._compare_module(live, there, path)
            return
        if isinstance(there, FileTensor):
            self._mismatch(path, "an optimizer", there)
            return
        if not isinstance(there, Mapping) or not {"state", "param_groups"} <= set(there):
            self.problems.append(f"{path_name(path)}: the file holds no optimizer's state")
            return
        self.used.add((*path, "param_groups"))
        groups = self._made(there["param_groups"], (*path, "param_groups"))
        try:
            names = live.take_groups(groups)
        except ours(ValueError) as error:
            self.problems.append(f"{path_name(path)}: {error}")
            return
        if names is None:
            self.problems.append(
                f"{path_name(path)}: the file numbers its parameters, and there are not as many"
            )
            return
        if not there["state"]:
            self.used.add((*path, "state"))
        for name in {**live.parameters, **live.entries}:
            key = names.get(name, name)
            where = (*path, "state", key)
            if not (state := there["state"].get(key)):
                had = live.entries.pop(name, None) is not None
                if state is not None:  # an optimizer that asks for its state makes an empty one
                    self.used.add(where)
                    live.entries[name] = {}
                if name not in names and (had or there["state"]):
                    self.missing.append(path_name(where))
                continue
            if name not in names:
                self.missing.append(f"{path_name((*path, 'param_groups'))} (settings of {name})")
            if name in live.entries or (not _fits(live.parameters[name], state) and live.make()):
                self._compare(live.entries[name], state, where)
            else:
                self.used.add(where)
                live.entries[name] = self._made(state, where, live.parameters[name])

    def _compare_module(self, live: LiveState, there: Any, path: Path) -> None:
        """Compare a module's state with the file's.

        In place only where the file has the module's own tensors: else the module's own
        `load_state_dict` gets what is in the file, as on one process.
        """
        if not isinstance(there, Mapping):
            self._compare(live.entries, there, path)
            return
        live.take_versions(there)
        if self._needs_own(live, there):
            made = {}
            for key, item in there.items():
                where = (*path, key)
                if key in live.entries:
                    self.used.add(where)
                else:
                    self.offered[where] = live
                made[key] = self._made(item, where, _like(live.entries.get(key), item))
            live.replace(made)
            return
        # Extra states: the module knows what they are.
        others = {key for key, one in live.entries.items() if not is_leaf(one) and key in there}
        for key in others:
            self.used.add((*path, key))
            live.entries[key] = self._made(there[key], (*path, key))
        tensors = {key: one for key, one in live.entries.items() if key not in others}
        found = {key: item for key, item in there.items() if key not in others}
        self._compare_container(tensors, found, path)

    def _needs_own(self, live: LiveState, there: Mapping[Any, Any]) -> bool:
        """Return whether only the module's own `load_state_dict` can load what the file has."""
        tensors = {key: one for key, one in live.entries.items() if is_leaf(one)}
        differing = {
            key
            for key, one in tensors.items()
            if not _is_alike(one, there.get(key)) and not (self.tied and key not in there)
        }
        if live.conversion is Conversion.USERS and there.keys() - live.entries.keys():
            return True
        return bool(differing) and (
            live.conversion is not Conversion.NONE
            or all(
                isinstance(one := there.get(key), FileTensor)
                and is_scalar_for(tensors[key], one.shape)
                for key in differing
            )
        )

    def _compare_container(self, into: Any, there: Any, path: Path) -> Any:
        """Compare item by item; return a tuple as a new one, if an item of it is another."""
        is_mapping = isinstance(into, Mapping)
        if not isinstance(there, Mapping if is_mapping else _LISTS):
            self._mismatch(path, "a dictionary" if is_mapping else "a list", there)
            return into
        if not there:
            self.used.add(path)
        found = dict(items_of(there))
        changed: dict[Any, Any] = {}
        for key, item in items_of(into):
            where = (*path, key)
            if key not in found:
                self.missing.append(path_name(where))
                self._absent[path_name(where)] = item
                continue
            new = self._compare(item, found[key], where)
            if new is not item:
                changed[key] = new
        if isinstance(into, MutableMapping | list):
            for key, new in changed.items():
                self._puts.append(partial(into.__setitem__, key, new))
            return into
        changed = {key: new for key, new in changed.items() if not _are_equal(into[key], new)}
        if changed and is_mapping:
            self.problems.append(f"{path_name(path)}: its values cannot be replaced")
        elif changed:
            return sequence_like(into, [changed.get(at, item) for at, item in enumerate(into)])
        return into

    def _compare_tensor(self, into: Any, there: Any, path: Path) -> None:
        name = path_name(path)
        if not isinstance(there, FileTensor):
            self._mismatch(path, "a tensor", there)
            return
        try:
            held = holding(into, name, self.rank, self.ranks, self._meshes)
        except ours(LoadMismatchError) as error:
            self.problems.append(str(error))
            return
        objection = _objection(held, there, self.cast)
        if objection is not None:
            self.problems.append(f"{name}: {objection}")
        else:
            self.jobs.append(TensorMatch(there, held))

    def _made(self, there: Any, path: Path, like: torch.Tensor | None = None) -> Any:
        """Return a value of the file with new tensors in it, which are filled like others.

        Args:
            like: tensors of its shape are made like it: split in the same way, on its device.
        """
        if isinstance(there, FileTensor):
            if there.problem is not None:
                self.problems.append(f"{path_name(path)}: {there.problem}")
                return None
            if like is None and there.same in self._tensors:
                return self._tensors[there.same]
            if like is not None and there.shape and like.shape == there.shape:
                new = torch.empty_like(like, dtype=there.dtype, requires_grad=False)
            else:
                new = torch.empty(there.shape, dtype=there.dtype, device="cpu")
            if like is None:
                self._tensors[there.same] = new
            held = holding(new, path_name(path), self.rank, self.ranks, self._meshes)
            self.jobs.append(TensorMatch(there, held))
            return new
        if not is_container(there):
            return there
        if isinstance(there, MutableMapping):
            for key, item in there.items():
                there[key] = self._made(item, (*path, key), like)
        elif isinstance(there, list):
            there[:] = [self._made(item, (*path, at), like) for at, item in enumerate(there)]
        elif is_plain_tuple(there):
            made = [self._made(item, (*path, at), like) for at, item in enumerate(there)]
            return sequence_like(there, made)
        return there

    def _mismatch(self, path: Path, wanted: str, there: Any) -> None:
        self.used.add(path)
        if isinstance(there, FileTensor) and there.problem is not None:
            self.problems.append(f"{path_name(path)}: {there.problem}")
            return
        found = "a tensor" if isinstance(there, FileTensor) else f"a {type(there).__name__}"
        self.problems.append(f"{path_name(path)}: it is {wanted} here, in the file {found}")


def _is_alike(tensor: Any, there: Any) -> bool:
    """Return whether the file has a tensor of this shape."""
    known = isinstance(there, FileTensor) and not is_lazy(tensor)
    return known and there.shape == tuple(tensor.shape)


def _like(entry: Any, there: Any) -> torch.Tensor | None:
    """Return the tensor of a module that a new one of the file is made like, if one has to be."""
    sharded = as_dtensor(entry)
    return sharded if sharded is not None and _is_alike(sharded, there) else None


def _spot(local: torch.Tensor) -> tuple[object, ...]:
    return local.device, local.data_ptr(), local.shape, local.stride()


def _is_tied(item: object, filled: set[tuple[object, ...]]) -> bool:
    """Return whether a tensor is filled under another key; or if the other ranks say that.

    A rank cannot see it of a tensor of which it has nothing.
    """
    if not is_leaf(item):
        return False
    local = local_of(item)
    return not local.numel() or _spot(local) in filled


def _are_values(into: Any, there: Any) -> bool:
    """Return whether two containers of a kind are plain values: no tensor is in either."""
    containers = is_container(into) and is_container(there)
    alike = any(isinstance(into, kind) and isinstance(there, kind) for kind in (Mapping, _LISTS))
    return containers and alike and not _holds_tensors(into) and not _holds_tensors(there)


def _holds_tensors(value: Any) -> bool:
    """Return whether a tensor, module or optimizer is in a container."""
    return any(
        isinstance(item, FileTensor) or is_leaf(item) or is_live(item)
        for _, item in walk(value, once=True, objects=True)
    )


def _are_equal(item: Any, new: Any) -> bool:
    """Return whether a value of the file is the one that is there already."""
    return type(item) is type(new) and not _holds_tensors((new,)) and bool(item == new)


def _fits(parameter: torch.Tensor, state: Any) -> bool:
    """Return whether a parameter's state can be made from what the file says of it.

    How tensors of other shapes are split is known to the optimizer of a split parameter only.
    """
    if as_dtensor(parameter) is None:
        return True
    tensors = [found for _, found in file_leaves(state) if isinstance(found, FileTensor)]
    return bool(parameter.shape) and all(found.shape in ((), parameter.shape) for found in tensors)


def _objection(held: Holding, there: FileTensor, cast: bool) -> str | None:
    """Return why a tensor of the file does not fit."""
    spec, local = held.spec, held.local
    if there.problem is not None:
        return there.problem
    if spec.shape != there.shape:
        return f"its shape is {spec.shape} here, in the file {there.shape}"
    if spec.dtype != there.dtype:
        if not cast:
            return f"its dtype is {spec.dtype} here, in the file {there.dtype} (cast=True converts)"
        if not torch.can_cast(there.dtype, spec.dtype):
            return f"{there.dtype} in the file cannot be converted to {spec.dtype}"
    return why_not_filled(local)


def path_name(path: Path) -> str:
    """Return a path for people, in dots."""
    return ".".join(map(str, path)) or "the object"


def file_leaves(value: Any) -> list[tuple[Path, Any]]:
    """Return what a file holds that is no container, and empty ones, with their paths in order."""
    found: list[tuple[Path, Any]] = []

    def visit(value: Any, path: Path, above: tuple[int, ...]) -> None:
        looked_into = isinstance(value, Mapping | list) or is_plain_tuple(value)
        items = items_of(value) if looked_into and is_container(value) else []
        if not items:
            found.append((path, value))
            return
        if id(value) not in above:
            for key, item in items:
                visit(item, (*path, key), (*above, id(value)))

    visit(value, (), ())
    return found


def unused(leaves: list[tuple[Path, Any]], used: Container[Path]) -> Iterator[int]:
    """Yield the numbers of the leaves of which no beginning of the path is used."""
    for number, (path, _) in enumerate(leaves):
        if not any(path[:length] in used for length in range(len(path) + 1)):
            yield number
