"""What of a rank's tensors decides a plan: if it is as at the last save, so is the plan.

What the tensors hold is not among it, nor are the tensors: nothing of a state is kept alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fastserial.distributed.flat_shard import FlatShard

__all__ = ["facts_of"]

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def facts_of(leaves: Sequence[tuple[str, Any]], pickles: bool) -> list[Any] | None:
    """Return what decides the plan of a state, to be compared with `==`.

    Args:
        leaves: as `walk.leaves` gives them.
        pickles: also what decides how the tensors are pickled.

    Returns:
        None: there is a tensor of an unusual type, of which it is not known.
    """
    storages: dict[int, int] = {}
    meshes: dict[int, tuple[weakref.ref[Any], bool]] = {}
    sharded = _dtensor_type()
    found: list[Any] = [_ties(leaves)]
    add = found.append
    for name, leaf in leaves:
        kind = type(leaf)
        if kind is sharded:
            # The properties of a DTensor take these from there, many times slower.
            spec, local = leaf._spec, leaf._local_tensor
            mesh = meshes.get(id(spec.mesh))
            if mesh is None:
                on_host = spec.mesh.device_type == "cpu"
                mesh = meshes[id(spec.mesh)] = (weakref.ref(spec.mesh), on_host)
            device = None if mesh[1] else local.device
            grad = pickles and leaf.requires_grad
            meta = spec.tensor_meta or (leaf.shape, leaf.dtype)
            add((name, mesh[0], spec.placements, meta, local.shape, device, grad))
        elif kind in _PLAIN:
            if (not leaf.is_cpu and leaf.device.type == "meta") or leaf.__dict__:
                return None
            if leaf.layout is not torch.strided:
                return None
            storage = leaf.untyped_storage()
            memory = storages.setdefault(storage._cdata, len(storages))
            device = None if leaf.is_cpu else leaf.device
            view = (leaf.shape, leaf.stride(), leaf.storage_offset())
            bits = pickles and (leaf.requires_grad, leaf.is_conj(), leaf.is_neg())
            add((name, kind, memory, storage.nbytes(), device, leaf.dtype, view, bits))
        elif kind is FlatShard:
            device = leaf.tensor.device
            add((name, kind, leaf.param_shape, leaf.start, leaf.length, leaf.dtype, device))
        else:
            return None
    return found


def numbers_of(leaves: Sequence[tuple[str, Any]]) -> dict[int, int]:
    """Return the place of each leaf among the others, by its `id`."""
    return {id(leaf): number for number, (_, leaf) in enumerate(leaves)}


def _ties(leaves: Sequence[tuple[str, Any]]) -> list[int] | None:
    """Return which leaves are the same object, None if none are."""
    numbers = numbers_of(leaves)
    if len(numbers) == len(leaves):
        return None
    return [numbers[id(leaf)] for _, leaf in leaves]


def _dtensor_type() -> Any:
    """Return DTensor. Imports nothing: without the module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module.DTensor if module is not None else facts_of
