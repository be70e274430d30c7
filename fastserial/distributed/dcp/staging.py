"""Copies of a state for `dcp.async_save`, in the memory that background saves share."""

from __future__ import annotations

import copy
import ctypes
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from fastserial.formats.tensors import reach
from fastserial.memory.storages import HostMemory
from fastserial.nests import PLAIN_VALUES
from fastserial.overlap.snapshot import Snapshot, StoragePart

_log = logging.getLogger("fastserial")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def staged(state: Any) -> Any:
    """Return a copy of a nest of containers on the host; tensors that occur twice are copied once.

    The memory is used again by the next save once no tensor of the copy is left. Where it would be
    more than half of what is free, divided by the ranks of the node, and for tensors that are not
    plain memory, torch makes each copy, as its own stager does.

    Raises:
        StorageChangedError: a storage was resized meanwhile.
    """
    with torch.no_grad():
        tensors = {id(one): one for one in _tensors(state)}
        return _rebuilt(state, _copies(tensors.values()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _copies(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return what can be copied as memory, by the `id` of the originals."""
    plain = [(one, local) for one in tensors if (local := _memory_of(one)) is not None]
    taken = Snapshot(None, perf_counter())
    found = taken.take([_part(local) for _, local in plain])
    if found is None:
        _log.debug("dcp.async_save: no room for the snapshot in half of the free memory")
        return {}
    lent = _Lent()
    weakref.finalize(lent, taken.end).atexit = False
    copies: dict[int, torch.Tensor] = {}
    for (one, local), memory in zip(plain, found, strict=True):
        made = _tensor_in(memory, lent, local)
        if isinstance(one, DTensor):
            make: Any = DTensor
            made = make(made, one._spec, requires_grad=False)
        copies[id(one)] = made
    return copies


class _Lent:
    """What all copies of one state keep: when it is gone, so are they."""


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of this rank whose memory makes up a tensor; None: torch has to copy it."""
    local = tensor._local_tensor if type(tensor) is DTensor else tensor
    if type(local) not in _PLAIN or local.layout is not torch.strided or local.is_quantized:
        return None
    if local.is_meta or local.is_conj() or local.is_neg() or local._is_zerotensor():
        return None
    spanned = reach(local.shape, local.stride())
    end = (int(local.storage_offset()) + spanned) * local.element_size()
    if not 0 < spanned <= local.numel() or end > local.untyped_storage().nbytes():
        return None
    return local


def _part(local: torch.Tensor) -> StoragePart:
    item = local.element_size()
    nbytes = reach(local.shape, local.stride()) * item
    return StoragePart(local.untyped_storage(), int(local.storage_offset()) * item, nbytes)


def _tensor_in(memory: HostMemory, lent: _Lent, like: torch.Tensor) -> torch.Tensor:
    """Return host memory as a tensor of the same shape, strides and dtype, which keeps `lent`."""
    anchor: Any = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)
    anchor.owner = lent
    flat = torch.frombuffer(anchor, dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _rebuilt(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, ShardedTensor):
        return copy.deepcopy(value) if value.device.type == "cpu" else value.to(device="cpu")
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
        return copies[id(value)]
    if isinstance(value, Mapping):
        return {key: _rebuilt(item, copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items: Sequence[Any] = [_rebuilt(item, copies) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value if type(value) in PLAIN_VALUES else copy.deepcopy(value)
