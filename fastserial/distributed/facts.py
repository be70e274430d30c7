"""What of a rank's tensors decides a plan: if it is as at the last save, so is the plan.

What the tensors hold is not among it, nor are the tensors: nothing of a state is kept alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fastserial.distributed.flat_shard import FlatShard

__all__ = ["facts_of"]

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def facts_of(leaves: Iterable[tuple[str, Any]]) -> list[Any] | None:
    """Return what decides the plan of a state, to be compared with `==`.

    Args:
        leaves: as `walk.leaves` gives them.

    Returns:
        None: there is a tensor of an unusual type, of which it is not known.
    """
    found: list[Any] = []
    numbers: dict[int, int] = {}
    storages: dict[int, int] = {}
    meshes: dict[int, weakref.ref[Any]] = {}
    sharded = _dtensor_type()
    for name, leaf in leaves:
        kind = type(leaf)
        number = numbers.setdefault(id(leaf), len(numbers))
        if kind is sharded:
            mesh = leaf.device_mesh
            known = meshes.get(id(mesh))
            if known is None:
                known = meshes[id(mesh)] = weakref.ref(mesh)
            local = leaf._local_tensor
            found.append(
                (
                    *(name, number, kind, known, leaf.placements, leaf.shape, leaf.dtype),
                    *(local.shape, local.device, leaf.requires_grad),
                )
            )
        elif kind in _PLAIN:
            if leaf.layout is not torch.strided or leaf.device.type == "meta" or leaf.__dict__:
                return None
            storage = leaf.untyped_storage()
            place = storages.setdefault(storage._cdata, len(storages))
            found.append(
                (
                    *(name, number, kind, place, storage.nbytes(), leaf.storage_offset()),
                    *(leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad),
                    *(leaf.is_conj(), leaf.is_neg()),
                )
            )
        elif kind is FlatShard:
            place = (leaf.param_shape, leaf.start, leaf.length)
            found.append((name, number, kind, *place, leaf.dtype, leaf.tensor.device))
        else:
            return None
    return found


def _dtensor_type() -> Any:
    """Return DTensor. Imports nothing: without the module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module.DTensor if module is not None else facts_of
