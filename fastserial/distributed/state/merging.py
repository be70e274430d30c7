"""The union of states of which each rank has other keys, such as the stages of a pipeline.

Every rank gets the states of all without the tensors' bytes, and merges them in the order of the
ranks: a key that several have is the first one's, a tensor that several have is shared. States that
are equal, as those of the ranks of one stage, are sent and merged once; those of the last save are
not sent again.
Of optimizers, the groups of all ranks are kept; groups with equal settings become one, as in the
optimizer of the whole model.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastserial.checkpoints.own_loading import versions_in
from fastserial.distributed.comm.distinct import gather_distinct
from fastserial.distributed.comm.group import RankGroup
from fastserial.distributed.layout.flat_shard import FlatShard
from fastserial.distributed.layout.placement import (
    Flat,
    Mesh,
    TensorSpec,
    as_dtensor,
    holding,
    unloadable,
)
from fastserial.errors import LoadMismatchError
from fastserial.nests import replaced, sequence_like


@dataclass(slots=True, eq=False)
class LeafSpec:
    """A tensor of a state, whichever ranks have it, without its elements.

    Attributes:
        spec: the whole tensor. Of a FlatShard it has the range of this rank only.
        requires_grad: as it is pickled.
        storage: of a plain tensor: number of its storage on this rank, bytes of the storage, and
            the tensor's offset and stride in it (elements). None: a DTensor or a FlatShard.
        is_parameter: of a plain tensor.
        is_buffer: of a plain tensor: it is in the memory of a module's buffer.
        ranks: that have it; None: all of them.
        grids: of the meshes on which these have it.
        leaf: what this rank has, if it does.
    """

    spec: TensorSpec
    requires_grad: bool = False
    storage: tuple[int, int, int, tuple[int, ...]] | None = None
    is_parameter: bool = False
    is_buffer: bool = False
    ranks: Sequence[int] | None = None
    grids: list[tuple[int, ...]] = field(default_factory=list)
    leaf: Any = None

    def signature(self) -> tuple[Any, ...]:
        """Return what has to be the same on all ranks that have the tensor."""
        held = self.spec.held
        mesh = (held.shape, held.splits) if isinstance(held, Mesh) else type(held)
        view = self.storage[1:] if self.storage is not None else None
        return self.spec.shape, str(self.spec.dtype), mesh, view


class Describer:
    """Describes the tensors of one state."""

    def __init__(self, rank: int, ranks: Mapping[int, int], buffers: Set[int]) -> None:
        """Have met no storage yet.

        Args:
            rank: this rank in the group.
            ranks: the group's rank of each global rank.
            buffers: identities of the storages of modules' buffers.
        """
        self._rank, self._ranks = rank, ranks
        self._meshes: dict[int, tuple[int, ...]] = {}
        self._alike: dict[Any, TensorSpec] = {}  # what is known of DTensors
        self._buffers = buffers
        self._storages: dict[int, int] = {}

    def describe(self, leaf: Any, key: str) -> LeafSpec:
        """Return what there is to say of a tensor.

        Raises:
            LoadMismatchError: no load could fill it, or its placement cannot be in a file.
        """
        if isinstance(leaf, FlatShard):
            return LeafSpec(self._held(leaf, key))
        if as_dtensor(leaf) is not None:
            local = leaf._local_tensor
            kind = type(local)  # not all may be read as memory
            alike = (
                id(leaf.device_mesh),
                leaf.placements,
                leaf.shape,
                local.dtype,
                local.shape,
                kind,
            )
            spec = self._alike.get(alike)
            if spec is None:
                spec = self._alike[alike] = self._held(leaf, key)
            return LeafSpec(spec, leaf.requires_grad)
        if (odd := unloadable(leaf)) is not None:
            raise LoadMismatchError(f"{key}: {odd}")
        storage = leaf.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        return LeafSpec(
            TensorSpec(tuple(leaf.shape), leaf.dtype),
            leaf.requires_grad,
            (number, storage.nbytes(), leaf.storage_offset(), leaf.stride()),
            isinstance(leaf, torch.nn.Parameter),
            storage._cdata in self._buffers,
        )

    def _held(self, leaf: Any, key: str) -> TensorSpec:
        return holding(leaf, key, self._rank, self._ranks, self._meshes).spec


_OF_AN_OPTIMIZER = {"state", "param_groups"}
_PLAIN = (int, float, bool, str, tuple, type(None))  # settings that `==` compares


def leaf_of(value: Any) -> Any:
    """Return this rank's part of a leaf, None if it has none."""
    return value.leaf if isinstance(value, LeafSpec) else value


def merged(state: Any, comm: RankGroup, buffers: Set[int] = frozenset()) -> Any:
    """Return the union of all ranks' states. Collective.

    Args:
        buffers: identities of the storages of modules' buffers.

    Raises:
        LoadMismatchError: ranks have different tensors under one key.
    """
    mine, leaves = described(state, Describer(comm.rank, comm.ranks, buffers))
    found: dict[int, Any] = {}
    for text, ranks in gather_distinct(comm, [mine], "states"):
        found[ranks[0]], specs = pickle.loads(text)
        for number, spec in enumerate(specs):
            held = spec.spec.held
            spec.ranks, spec.leaf = ranks, leaves[number] if text == mine else None
            spec.grids = list(held.grids) if isinstance(held, Mesh) else []
    return _Union(comm.jobs).of("", found)


def described(state: Any, describer: Describer) -> tuple[bytes, list[Any]]:
    """Return a state without the tensors' bytes, equal for equal ones; and its tensors."""
    found: dict[int, tuple[Any, LeafSpec]] = {}

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor | FlatShard):
            return value
        if id(value) not in found:
            shape = value.param_shape if isinstance(value, FlatShard) else tuple(value.shape)
            like = describer.describe(value, f"a tensor of shape {shape}")
            if isinstance(value, FlatShard):  # its range is this rank's only
                like.spec = replace(like.spec, held=Flat(()))
            found[id(value)] = value, like
        return found[id(value)][1]

    skeleton = replaced(state, change)
    specs = [like for _, like in found.values()]
    return pickle.dumps((skeleton, specs)), [leaf for leaf, _ in found.values()]


class _Union:
    """Merges the values of several ranks: a key that several have is the first one's."""

    def __init__(self, jobs: Sequence[int]) -> None:
        self._jobs = jobs  # the job's ranks, which errors name
        # What became of containers, by their `id`; with them, so that they live on.
        self._made: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    def of(self, path: str, values: dict[int, Any]) -> Any:
        """Return the union of the values of several ranks, by their numbers.

        Raises:
            LoadMismatchError: they are different tensors.
        """
        kept = list(values.values())
        first = kept[0]
        if any(isinstance(value, LeafSpec) for value in kept):
            return _together(path, kept, self._jobs)
        if not isinstance(first, dict | list | tuple):
            return first
        same = tuple(map(id, kept))
        if same not in self._made:
            self._made[same] = kept, first  # it may hold itself
            self._made[same] = kept, self._container(path, first, values)
        return self._made[same][1]

    def _container(self, path: str, first: Any, values: dict[int, Any]) -> Any:
        if isinstance(first, dict):
            others = {rank: value for rank, value in values.items() if isinstance(value, Mapping)}
            keys = dict.fromkeys(key for value in others.values() for key in value)
            whole = {key: self._entry(path, key, others) for key in keys}
            versions = versions_in(first)
            for value in others.values():
                for name, version in (versions_in(value) or {}).items() if versions else ():
                    versions.setdefault(name, version)
            first.clear()
            first.update(whole)
            return first
        some = {
            rank: value
            for rank, value in values.items()
            if type(value) is type(first) and len(value) == len(first)
        }
        items = [
            self.of(f"{path}.{index}", {rank: value[index] for rank, value in some.items()})
            for index in range(len(first))
        ]
        if isinstance(first, list):
            first[:] = items
            return first
        return sequence_like(first, items)

    def _entry(self, path: str, key: Any, values: dict[int, Any]) -> Any:
        """Return the union of an entry of dictionaries, which some may lack."""
        if key == "param_groups" and all(map(is_of_an_optimizer, values.values())):
            return _groups([value["param_groups"] for value in values.values()])
        found = {rank: value[key] for rank, value in values.items() if key in value}
        return self.of(f"{path}.{key}" if path else str(key), found)


def is_of_an_optimizer(state: Mapping[Any, Any]) -> bool:
    """Return whether a dictionary is what an optimizer's `state_dict` returns."""
    if not state.keys() >= _OF_AN_OPTIMIZER or not isinstance(state["param_groups"], list):
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
    """Return whether groups surely have equal settings; of tensors, only shapes are known."""
    return one.keys() == other.keys() and all(
        key == "params"
        or value is other[key]
        or (type(value) is type(other[key]) and type(value) in _PLAIN and value == other[key])
        for key, value in one.items()
    )


def _together(path: str, values: list[Any], jobs: Sequence[int]) -> LeafSpec:
    """Return a tensor that several ranks have as one."""
    first = values[0]
    for value in values[1:]:
        if not isinstance(value, LeafSpec) or not isinstance(first, LeafSpec):
            raise LoadMismatchError(f"{path} is a tensor on some ranks and none on others")
        if value is first:
            continue
        ranks, more = first.ranks or [], value.ranks or []
        if value.signature() != first.signature():
            raise LoadMismatchError(
                f"{path}: ranks {jobs[ranks[0]]} and {jobs[more[0]]} have different tensors: "
                f"{_words(first.spec)} and {_words(value.spec)}"
            )
        if more[0] in ranks:
            continue  # it is under another key, too
        first.ranks = [*ranks, *more]
        first.grids += value.grids
        first.leaf = value.leaf if first.leaf is None else first.leaf
    return first  # type: ignore[no-any-return]


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype} of shape {spec.shape}"
