"""A copy of a state on the host, for `async_save`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

__all__ = ["snapshot"]


def snapshot(state: Any) -> Any:
    """Return a copy of a nest of containers; tensors that occur twice are copied once."""
    with torch.no_grad():
        return _copy(state, {})


# Tensors and their copies, by `id`. The tensors are kept: another one could get the `id` else.
_Copies = dict[int, tuple[torch.Tensor, torch.Tensor]]


def _copy(value: Any, copies: _Copies) -> Any:
    if isinstance(value, ShardedTensor):
        return _copy_sharded(value)
    if isinstance(value, torch.Tensor):
        found = copies.get(id(value))
        if found is None:
            found = copies[id(value)] = value, value.detach().to("cpu", copy=True)
        return found[1]
    if isinstance(value, Mapping):
        return {key: _copy(item, copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copy(item, copies) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    return copy.deepcopy(value)


def _copy_sharded(value: ShardedTensor) -> Any:
    """Return a copy with shards of its own."""
    if value.device.type != "cpu":
        return value.to(device="cpu")
    return copy.deepcopy(value)
