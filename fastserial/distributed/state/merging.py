"""States of which each rank has other keys, as the stages of a pipeline, made one.

Every rank tells its state without the tensors' bytes, and puts all of them together in the order
of the ranks: a key that several have is the first one's, a tensor that several have is shared.
Of optimizers, the groups of all ranks are kept; groups with equal settings become one, as in the
optimizer of the whole model.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.sharding.flat_shard import FlatShard
from fastserial.distributed.sharding.pieces import Mesh, as_dtensor, holding, oddity
from fastserial.errors import LoadMismatchError
from fastserial.nests import sequence_like

__all__ = ["Described", "Joined", "Union", "leaf_of", "merged"]

_OF_AN_OPTIMIZER = {"state", "param_groups"}
_PLAIN = (int, float, bool, str, tuple, type(None))  # settings that `==` compares


@dataclass(frozen=True, slots=True)
class Described:
    """What a rank tells of one of its tensors.

    Attributes:
        kind: `plain`, `flat` (a FlatShard) or `mesh` (a DTensor).
        shape, dtype: of the whole.
        requires_grad: as it is pickled.
        mesh: of a DTensor.
        storage: of a plain tensor: number of its storage on that rank, bytes, and the tensor's
            offset and stride in it.
        is_parameter: of a plain tensor.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    mesh: Mesh | None = None
    storage: tuple[int, int, int, tuple[int, ...]] | None = None
    is_parameter: bool = False

    def likeness(self) -> tuple[Any, ...]:
        """Return what has to be the same on all ranks that have the tensor."""
        mesh = (self.mesh.shape, self.mesh.splits) if self.mesh is not None else None
        view = self.storage[1:] if self.storage is not None else None
        return self.kind, self.shape, str(self.dtype), mesh, view


@dataclass(slots=True, eq=False)
class Joined:
    """A tensor of a merged state.

    Attributes:
        told: by the first rank that has it.
        ranks: that have it.
        grids: of the meshes on which they have it.
        leaf: what this rank has, if it does.
    """

    told: Described
    ranks: list[int]
    grids: list[tuple[int, ...]] = field(default_factory=list)
    leaf: Any = None


def leaf_of(value: Any) -> Any:
    """Return what this rank has of a leaf, None if it has nothing of it."""
    return value.leaf if isinstance(value, Joined) else value


def merged(state: Any, traffic: Traffic) -> Any:
    """Return the union of all ranks' states. Collective.

    Raises:
        LoadMismatchError: ranks have different tensors under one key.
    """
    leaves: list[Any] = []
    told: list[Described] = []
    text = io.BytesIO()
    _Pickler(text, leaves, told, traffic).dump(state)
    message = pickle.dumps((text.getvalue(), told))
    answer = traffic.consult(message, pickle.dumps)
    found: dict[int, Any] = {}
    for rank, other in enumerate(pickle.loads(answer)):
        skeleton, described = pickle.loads(other)
        mine = leaves if rank == traffic.rank else [None] * len(described)
        found[rank] = _Unpickler(io.BytesIO(skeleton), rank, described, mine).load()
    return _OfRanks().of("", found)


class _Pickler(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, leaves: list[Any], told: list[Described], traffic: Traffic
    ) -> None:
        super().__init__(file)
        self._leaves = leaves
        self._told = told
        self._traffic = traffic
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor | FlatShard):
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._leaves)
            self._leaves.append(obj)
            self._told.append(self._described(obj))
        return number

    def _described(self, leaf: Any) -> Described:
        if isinstance(leaf, FlatShard):
            return Described("flat", leaf.param_shape, leaf.dtype, False)
        shape = tuple(leaf.shape)
        if as_dtensor(leaf) is not None:
            spec = holding(leaf, "a tensor", self._traffic.rank, self._traffic.ranks).spec
            mesh = spec.held if isinstance(spec.held, Mesh) else None
            return Described("mesh", shape, spec.dtype, leaf.requires_grad, mesh)
        if (odd := oddity(leaf)) is not None:
            raise LoadMismatchError(f"a tensor of shape {shape}: {odd}")
        storage = leaf.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        view = (number, storage.nbytes(), leaf.storage_offset(), leaf.stride())
        parameter = isinstance(leaf, torch.nn.Parameter)
        return Described("plain", shape, leaf.dtype, leaf.requires_grad, None, view, parameter)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, rank: int, told: list[Described], leaves: list[Any]
    ) -> None:
        super().__init__(file)
        self._made: list[Joined] = [
            Joined(described, [rank], list(described.mesh.grids) if described.mesh else [], leaf)
            for described, leaf in zip(told, leaves, strict=True)
        ]

    def persistent_load(self, number: Any) -> Any:
        return self._made[number]


class Union:
    """Puts the values of several ranks together; what they share, as what they share.

    Attributes:
        made: what became of containers, by the `id` of each; with them, so that they live on.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    def of(self, path: str, values: dict[int, Any]) -> Any:
        """Return what the values of several ranks, by their numbers, are together."""
        first = next(iter(values.values()))
        if not isinstance(first, dict | list | tuple):
            return first
        kept = list(values.values())
        same = tuple(map(id, kept))
        if same not in self.made:
            self.made[same] = kept, first  # it may hold itself
            self.made[same] = kept, self._container(path, first, values)
        return self.made[same][1]

    def alike(self, path: str, values: dict[int, Any]) -> dict[int, Any]:
        """Return the lists or tuples whose items are put together one by one."""
        raise NotImplementedError

    def entry(self, path: str, key: Any, values: dict[int, Any]) -> Any:
        """Return what an entry of the dictionaries `values`, which some may lack, is together."""
        found = {rank: value[key] for rank, value in values.items() if key in value}
        return self.of(f"{path}.{key}" if path else str(key), found)

    def _container(self, path: str, first: Any, values: dict[int, Any]) -> Any:
        if isinstance(first, dict):
            others = {rank: value for rank, value in values.items() if isinstance(value, Mapping)}
            keys = dict.fromkeys(key for value in others.values() for key in value)
            whole = {key: self.entry(path, key, others) for key in keys}
            first.clear()
            first.update(whole)
            return first
        some = self.alike(path, values)
        items = [
            self.of(f"{path}.{index}", {rank: value[index] for rank, value in some.items()})
            for index in range(len(first))
        ]
        if isinstance(first, list):
            first[:] = items
            return first
        return sequence_like(first, items)


class _OfRanks(Union):
    """The states of ranks: a key that several have is the first one's, a tensor is shared."""

    def of(self, path: str, values: dict[int, Any]) -> Any:
        """Return what the values are together.

        Raises:
            LoadMismatchError: they are different tensors.
        """
        if any(isinstance(value, Joined) for value in values.values()):
            return _together(path, list(values.values()))
        return super().of(path, values)

    def alike(self, path: str, values: dict[int, Any]) -> dict[int, Any]:
        first = next(iter(values.values()))
        return {
            rank: value
            for rank, value in values.items()
            if type(value) is type(first) and len(value) == len(first)
        }

    def entry(self, path: str, key: Any, values: dict[int, Any]) -> Any:
        if key == "param_groups" and all(map(_is_of_an_optimizer, values.values())):
            return _groups([value["param_groups"] for value in values.values()])
        return super().entry(path, key, values)


def _is_of_an_optimizer(state: Mapping[Any, Any]) -> bool:
    if state.keys() != _OF_AN_OPTIMIZER or not isinstance(state["param_groups"], list):
        return False
    return all(isinstance(group, dict) and "params" in group for group in state["param_groups"])


def _groups(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the parameter groups of several ranks' optimizers as those of one optimizer.

    A parameter that several ranks have is in the group of the first one.
    """
    whole: list[dict[str, Any]] = []
    seen: set[Any] = set()
    for group in (group for groups in found for group in groups):
        names = [name for name in group["params"] if name not in seen]
        if not names:
            continue
        seen.update(names)
        same = next((one for one in whole if _same_settings(one, group)), None)
        if same is None:
            whole.append({**group, "params": names})
        else:
            same["params"] += names
    return whole


def _same_settings(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether groups are known to have equal settings; of tensors, only shapes are known."""
    return one.keys() == other.keys() and all(
        key == "params"
        or value is other[key]
        or (type(value) is type(other[key]) and type(value) in _PLAIN and value == other[key])
        for key, value in one.items()
    )


def _together(path: str, values: list[Any]) -> Joined:
    """Return a tensor that several ranks have as one."""
    first = values[0]
    for value in values[1:]:
        if not isinstance(value, Joined) or not isinstance(first, Joined):
            raise LoadMismatchError(f"{path} is a tensor on some ranks and none on others")
        if value is first:
            continue
        if value.told.likeness() != first.told.likeness():
            raise LoadMismatchError(
                f"{path}: ranks {first.ranks[0]} and {value.ranks[0]} have different tensors: "
                f"{_words(first.told)} and {_words(value.told)}"
            )
        if value.ranks[0] in first.ranks:
            continue  # it has another key, too
        first.ranks += value.ranks
        first.grids += value.grids
        first.leaf = value.leaf if first.leaf is None else first.leaf
    return first  # type: ignore[no-any-return]


def _words(told: Described) -> str:
    return f"{told.dtype} of shape {told.shape}"
