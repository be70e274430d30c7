"""What of a rank's tensors decides a plan: if it is as at the last save, so is the plan.

What the tensors hold is not among it, nor are the tensors: nothing of a state is kept alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_GLOBAL = "global_shape"  # torch 2.15: a plain tensor that has it is a part of another one


def facts_of(
    keys: Sequence[Any], values: Sequence[Any], buffers: Set[int] = frozenset()
) -> list[Any] | None:
    """Return what decides the plan of a state, to be compared with `==`.

    Args:
        keys, values: of the tensors of the state.
        buffers: identities of the storages of modules' buffers.

    Returns:
        None: there is a tensor of an unusual type, of which it is not known.
    """
    same: dict[int, int] = {}  # the first of those that are one object
    found: list[Any] = [list(keys), [same.setdefault(id(one), len(same)) for one in values]]
    storages: dict[int, int] = {}
    meshes: dict[Any, int] = {}  # equal ones once
    sharded = _dtensor_type()
    with torch._C.DisableTorchFunctionSubclass():  # asking for overrides takes long
        for leaf in values:
            kind = type(leaf)
            fact = None
            if kind is sharded:
                fact = sharding_of(leaf, meshes)
            elif kind in _PLAIN:
                fact = _of_plain(leaf, storages, buffers)
            if fact is None:
                return None
            found.append((kind, fact))
    found.append([weakref.ref(mesh) for mesh in meshes])
    return found


def sharding_of(leaf: Any, meshes: dict[Any, int]) -> tuple[Any, ...] | None:
    """Return what decides which part of a DTensor each rank holds, None if that is not known.

    With the factors of strided shards, which some torch releases take for equal to plain ones, and
    the number of elements here: shards of a mesh of several dimensions may have been made from the
    left or from the right.
    """
    spec, shard = leaf._spec, leaf._local_tensor
    if type(shard) is not torch.Tensor:
        return None
    factors = [getattr(one, "split_factor", 1) for one in spec.placements]
    mesh = meshes.setdefault(spec.mesh, len(meshes))
    held = (shard.dtype, shard.device, shard.stride(), shard.numel())
    return mesh, spec.placements, factors, leaf.shape, held, leaf.requires_grad


def _of_plain(
    leaf: torch.Tensor, storages: dict[int, int], buffers: Set[int]
) -> tuple[Any, ...] | None:
    """Return what decides the plan of a plain tensor, None if it is unusual."""
    if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_nested:
        return None
    if _GLOBAL in leaf.__dict__:
        return None
    storage = leaf.untyped_storage()
    memory = storages.setdefault(storage._cdata, len(storages))
    view = (leaf.shape, leaf.stride(), leaf.storage_offset())
    bits = (leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), storage._cdata in buffers)
    return memory, storage.nbytes(), leaf.device, leaf.dtype, view, bits


def _dtensor_type() -> Any:
    """Return DTensor. Imports nothing: without the module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module.DTensor if module is not None else facts_of
