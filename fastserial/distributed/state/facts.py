"""What of a rank's tensors decides a plan: if it is as at the last save, so is the plan.

What the tensors hold is not among it, nor are the tensors: nothing of a state is kept alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from fastserial.distributed.sharding.flat_shard import FlatShard

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
            found.append(sharding)
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


def shardings(leaves: Sequence[Any]) -> list[Any] | None:
    """Return what decides which part of DTensors each rank holds; None: of one it is not known.

    It is a list of columns: the meshes that there are and which is that of each DTensor; what their
    specs say, of the same specs the same objects; the factors of strided shards, which some torch
    releases take for equal to plain ones; dtypes and strides of the local tensors, and their
    numbers of elements where these do not follow from the specs; whether they require gradients.
    """
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
    every = list(chain.from_iterable(placements))
    examples = dict(zip(map(type, every), every, strict=True))
    strided = any(hasattr(one, "split_factor") for one in examples.values())
    with torch._C.DisableTorchFunctionSubclass():  # asking for overrides takes long
        grads = list(map(_requires_grad, leaves))
    on_host = all(mesh.device_type == "cpu" for mesh in several)
    return [
        [weakref.ref(mesh) for mesh in several],
        [numbers[one] for one in ids] if len(several) > 1 else [],
        placements,
        metas,
        [[getattr(one, "split_factor", 1) for one in row] for row in placements] if strided else [],
        list(map(_dtype_of, shards)),
        list(map(torch.Tensor.stride, shards)),
        list(map(torch.Tensor.numel, shards)) if turns else [],
        grads,
        [] if on_host else [shard.device for shard in shards],
    ]


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
