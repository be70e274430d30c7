"""Nests of containers, tensors and values: made anew, and compared."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from support.sharded import same_bytes


def like(value: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """Return a nest with other tensors."""
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, dict):
        return {key: like(item, make) for key, item in value.items()}
    if isinstance(value, list):
        return [like(item, make) for item in value]
    return value


def zeros(full: torch.Tensor) -> torch.Tensor:
    return torch.empty(full.shape, dtype=full.dtype).zero_()


def blank(value: Any, make: Callable[[torch.Tensor], Any] = zeros) -> Any:
    """Return a nest into which the same is loaded: other tensors, and None for values."""
    if isinstance(value, dict):
        return {key: blank(item, make) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item, make) for item in value]
    return make(value) if isinstance(value, torch.Tensor) else None


def flat(value: Any, key: str = "") -> dict[str, torch.Tensor]:
    """Return the plain tensors of a nest by their dotted keys."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        return {key: value.detach()} if plain else {}
    items: Any = ()
    if type(value) in (dict, OrderedDict):
        items = value.items()
    elif type(value) in (list, tuple):
        items = enumerate(value)
    found: dict[str, torch.Tensor] = {}
    for name, item in items if key.count(".") < 90 else ():
        found |= flat(item, f"{key}.{name}" if key else str(name))
    return found


def differing(found: Any, wanted: Any, key: str = "") -> list[str]:
    """Return the keys at which two nests differ; of sharded tensors, in this rank's shards."""
    if isinstance(wanted, dict | list | tuple):
        items = wanted.items() if isinstance(wanted, dict) else enumerate(wanted)
        if len(found) != len(wanted):
            return [key]
        return [
            one for name, item in items for one in differing(found[name], item, f"{key}.{name}")
        ]
    shards = [getattr(one, "_local_tensor", getattr(one, "tensor", one)) for one in (found, wanted)]
    if all(isinstance(one, torch.Tensor) for one in shards):
        a, b = (one.resolve_conj().clone(memory_format=torch.contiguous_format) for one in shards)
        return [] if same_bytes(a, b) else [key]
    return [] if found == wanted else [key]
