"""What of a rank's tensors decides a plan: if it is as at the last save, so is the plan.

What the tensors hold is not among it, nor are the tensors: nothing of a state is kept alive.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch

from fastserial.distributed.sharding.flat_shard import FlatShard

__all__ = ["Shardings", "facts_of", "shardings"]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_GLOBAL = "global_shape"  # torch 2.15: a plain tensor that has it is a part of another one
_WRITES_ITSELF = "__create_write_items__"  # by which torch.distributed.checkpoint knows others
_FLAT = attrgetter(
    "param_shape", "start", "length", "dtype", "tensor.device", "tensor.dtype", "tensor.shape"
)
# Of thousands of tensors; one by one in Python takes twice as long.
_spec_of, _local_of, _dtype_of = map(attrgetter, ("_spec", "_local_tensor", "dtype"))
_sharding_of = attrgetter("mesh", "placements", "tensor_meta")
_requires_grad = attrgetter("requires_grad")


def facts_of(
    keys: Sequence[Any],
    values: Sequence[Any],
    last: Sequence[Any] | None = None,
    others: bool = False,
) -> list[Any] | None:
    """Return what decides the plan of a state, to be compared with `==`.

    Args:
        keys, values: of the state, flattened.
        last: those of an earlier save, if there are any.
        others: there may be values that are no tensors, whose types count.

    Returns:
        None: there is a tensor of an unusual type, of which it is not known.
    """
    types = list(map(type, values))
    found: list[Any] = [_ties(values) if not others else None, list(keys), types]
    storages: dict[int, int] = {}
    sharded = _dtensor_type()
    for kind, some in _by_type(values, types).items():
        if kind is sharded:
            sharding = shardings(some, last)
            if sharding is None:
                return None
            found += [sharding, _devices(some, sharding.meshes)]
        elif kind in _PLAIN:
            rows = _plain(some, storages)
            if rows is None:
                return None
            found.append(rows)
        elif kind is FlatShard and not others:
            found.append([_FLAT(leaf) for leaf in some])
        elif not others or issubclass(kind, torch.Tensor) or hasattr(kind, _WRITES_ITSELF):
            return None
    return found


def _by_type(values: Sequence[Any], types: list[type]) -> dict[type, list[Any]]:
    """Return values by their type, in their order."""
    if len(set(types)) == 1:
        return {types[0]: list(values)}
    found: dict[type, list[Any]] = {kind: [] for kind in types}
    for kind, value in zip(types, values, strict=True):
        found[kind].append(value)
    return found


@dataclass(slots=True)
class Shardings:
    """What decides which part of DTensors each rank holds, by columns.

    Attributes:
        specs: references to theirs, which are not to be kept alive: nor are process groups. Empty
            if they do not say all.
        columns: what the specs say.
        dtypes, strides: of the local tensors.
        sizes: elements of the local tensors, where these do not follow from the specs.
        grads: whether they require gradients.
    """

    specs: list[weakref.ref[Any]] = field(compare=False)
    columns: list[list[Any]]
    dtypes: list[torch.dtype]
    strides: list[tuple[int, ...]]
    sizes: list[int] | None = None
    grads: list[bool] = field(default_factory=list)

    @property
    def meshes(self) -> list[Any]:
        """The meshes that there are, None for one that is gone."""
        return [mesh() for mesh in self.columns[0]]


def shardings(leaves: Sequence[Any], last: Sequence[Any] | None = None) -> Shardings | None:
    """Return what decides which part of DTensors each rank holds; None: of one it is not known.

    Args:
        last: earlier facts. A spec does not change: what the same ones say is taken from there.
    """
    specs = list(map(weakref.ref, map(_spec_of, leaves)))
    before = next((one for one in last or () if isinstance(one, Shardings)), None)
    if (
        before is not None
        and len(before.specs) == len(specs)
        and all(map(is_, before.specs, specs))
    ):
        columns = before.columns
    else:
        columns, complete = _columns(leaves)
        if not complete:
            specs = []
    shards = list(map(_local_of, leaves))
    if set(map(type, shards)) != {torch.Tensor}:
        return None
    strides = list(map(torch.Tensor.stride, shards))
    found = Shardings(specs, columns, list(map(_dtype_of, shards)), strides)
    if any(mesh is None or mesh.ndim > 1 for mesh in found.meshes):
        # Shards may have been made from the left dimension of the mesh to the right, or back.
        found.sizes = list(map(torch.Tensor.numel, shards))
    with torch._C.DisableTorchFunctionSubclass():  # asking for overrides takes long
        found.grads = list(map(_requires_grad, leaves))
    return found


def _columns(leaves: Sequence[Any]) -> tuple[list[list[Any]], bool]:
    """Return what specs of DTensors say, and whether they say all.

    The tensors' own properties are many times slower.
    """
    rows = map(_sharding_of, map(_spec_of, leaves))
    meshes, placements, metas = map(list, zip(*rows, strict=True))
    complete = None not in metas
    if not complete:
        metas = [(leaf.shape, leaf.dtype) for leaf in leaves]
    found: list[list[Any]] = [*_meshes(meshes), placements, metas]
    if not _strides_are_compared():
        found.append([[getattr(one, "split_factor", 1) for one in row] for row in placements])
    return found, complete


@functools.cache
def _strides_are_compared() -> bool:
    """Return whether a strided shard is another one than a plain one: not in all releases."""
    types = sys.modules["torch.distributed.tensor"].placement_types
    strided = types._StridedShard
    return strided(0, split_factor=2) not in (types.Shard(0), strided(0, split_factor=4))


def _meshes(meshes: list[Any]) -> list[list[Any]]:
    """Return the meshes that there are, equal ones once, and which is that of each DTensor."""
    ids = list(map(id, meshes))
    several: dict[Any, int] = {}
    places = {
        number: several.setdefault(mesh, len(several))
        for number, mesh in dict(zip(ids, meshes, strict=True)).items()
    }
    refs = [weakref.ref(mesh) for mesh in several]
    return [refs, [places[number] for number in ids] if len(refs) > 1 else []]


def _devices(leaves: Sequence[Any], meshes: Sequence[Any]) -> list[Any] | None:
    """Return where DTensors on meshes are, None if they are on the host."""
    if all(mesh is not None and mesh.device_type == "cpu" for mesh in meshes):
        return None
    return [leaf._local_tensor.device for leaf in leaves]


def _plain(leaves: Sequence[torch.Tensor], storages: dict[int, int]) -> list[Any] | None:
    """Return what decides the plan of plain tensors, None if one is unusual.

    Args:
        storages: the numbers of those met so far.
    """
    found: list[Any] = []
    for leaf in leaves:
        if not leaf.is_cpu and leaf.device.type == "meta":
            return None
        if leaf.layout is not torch.strided or _GLOBAL in leaf.__dict__:
            return None
        storage = leaf.untyped_storage()
        memory = storages.setdefault(storage._cdata, len(storages))
        device = None if leaf.is_cpu else leaf.device
        view = (leaf.shape, leaf.stride(), leaf.storage_offset())
        bits = (leaf.requires_grad, leaf.is_conj(), leaf.is_neg())
        found.append((memory, storage.nbytes(), device, leaf.dtype, view, bits))
    return found


def _ties(values: Sequence[Any]) -> list[int] | None:
    """Return which leaves are the same object, None if none are."""
    if len(set(map(id, values))) == len(values):
        return None
    numbers = dict(zip(map(id, values), range(len(values)), strict=True))
    return [numbers[id(value)] for value in values]


def _dtensor_type() -> Any:
    """Return DTensor. Imports nothing: without the module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module.DTensor if module is not None else facts_of
