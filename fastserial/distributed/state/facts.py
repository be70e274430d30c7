"""What of a rank's tensors decides a plan: if it is as at the last save, so is the plan.

What the tensors hold is not among it, nor are the tensors: nothing of a state is kept alive.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fastserial.distributed.sharding.flat_shard import FlatShard

__all__ = ["Shardings", "facts_of", "shardings"]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_GLOBAL = "global_shape"  # torch 2.15: a plain tensor that has it is a part of another one
_FLAT = attrgetter(
    "param_shape", "start", "length", "dtype", "tensor.device", "tensor.dtype", "tensor.shape"
)
# Of thousands of tensors; one by one in Python takes twice as long.
_spec_of, _local_of, _dtype_of = map(attrgetter, ("_spec", "_local_tensor", "dtype"))
_sharding_of = attrgetter("mesh", "placements", "tensor_meta")
_requires_grad = attrgetter("requires_grad")


def facts_of(keys: Sequence[Any], values: Sequence[Any]) -> list[Any] | None:
    """Return what decides the plan of a state, to be compared with `==`.

    Args:
        keys, values: of the tensors of the state.

    Returns:
        None: there is a tensor of an unusual type, of which it is not known.
    """
    types = list(map(type, values))
    found: list[Any] = [_ties(values), list(keys), types]
    storages: dict[int, int] = {}
    sharded = _dtensor_type()
    for kind, some in _by_type(values, types).items():
        if kind is sharded:
            sharding = shardings(some)
            if sharding is None:
                return None
            found += [sharding, _devices(some, sharding.meshes)]
        elif kind in _PLAIN:
            rows = _plain(some, storages)
            if rows is None:
                return None
            found.append(rows)
        elif kind is FlatShard:
            found.append([_FLAT(leaf) for leaf in some])
        else:
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


class Shardings(NamedTuple):
    """What decides which part of DTensors each rank holds, by columns.

    Attributes:
        meshes, of_mesh: the meshes that there are, and which is that of each DTensor.
        placements, metas: what their specs say; of the same specs it is the same objects.
        factors: of strided shards, where torch takes them for equal to plain ones.
        dtypes, strides: of the local tensors.
        sizes: elements of the local tensors, where these do not follow from the specs.
        grads: whether they require gradients.
    """

    meshes: list[weakref.ref[Any]]
    of_mesh: list[int]
    placements: list[Any]
    metas: list[Any]
    factors: list[list[int]]
    dtypes: list[torch.dtype]
    strides: list[tuple[int, ...]]
    sizes: list[int]
    grads: list[bool]


def shardings(leaves: Sequence[Any]) -> Shardings | None:
    """Return what decides which part of DTensors each rank holds; None: of one it is not known."""
    shards = list(map(_local_of, leaves))
    if set(map(type, shards)) != {torch.Tensor}:
        return None
    meshes, placements, metas = map(
        list, zip(*map(_sharding_of, map(_spec_of, leaves)), strict=True)
    )
    if None in metas:
        metas = [(leaf.shape, leaf.dtype) for leaf in leaves]
    ids = list(map(id, meshes))
    several: dict[Any, int] = {}  # equal ones once
    numbers = {
        one: several.setdefault(mesh, len(several))
        for one, mesh in dict(zip(ids, meshes, strict=True)).items()
    }
    # Shards of a mesh of several dimensions may have been made from the left or from the right.
    turns = any(mesh.ndim > 1 for mesh in several)
    with torch._C.DisableTorchFunctionSubclass():  # asking for overrides takes long
        grads = list(map(_requires_grad, leaves))
    return Shardings(
        meshes=[weakref.ref(mesh) for mesh in several],
        of_mesh=[numbers[one] for one in ids] if len(several) > 1 else [],
        placements=placements,
        metas=metas,
        factors=[]
        if _strides_are_compared()
        else [[getattr(one, "split_factor", 1) for one in row] for row in placements],
        dtypes=list(map(_dtype_of, shards)),
        strides=list(map(torch.Tensor.stride, shards)),
        sizes=list(map(torch.Tensor.numel, shards)) if turns else [],
        grads=grads,
    )


@functools.cache
def _strides_are_compared() -> bool:
    """Return whether a strided shard is another one than a plain one: not in all releases."""
    types = sys.modules["torch.distributed.tensor"].placement_types
    strided = types._StridedShard
    return strided(0, split_factor=2) not in (types.Shard(0), strided(0, split_factor=4))


def _devices(leaves: Sequence[Any], meshes: Sequence[weakref.ref[Any]]) -> list[Any] | None:
    """Return where DTensors on meshes are, None if they are on the host."""
    found = [mesh() for mesh in meshes]
    if all(mesh is not None and mesh.device_type == "cpu" for mesh in found):
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
