"""What a checkpoint holds, whatever its format: named tensors that can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fastserial.bench.measuring.identical import different_tensors
from fastserial.bench.subjects.saving import stock

__all__ = ["tensors_of", "unshared", "zip_holds"]


def tensors_of(state: object) -> dict[str, torch.Tensor]:
    """Return the tensors of nested mappings and lists, by their dotted names."""
    return dict(_walk(state, ""))


def unshared(state: object) -> dict[str, torch.Tensor]:
    """Return the same, each storage once: what formats without shared storages can hold."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in tensors_of(state).items():
        storage = tensor.untyped_storage()._cdata
        if storage not in seen:
            seen.add(storage)
            kept[name] = tensor
    return kept


def zip_holds(state: object, path: Path) -> bool:
    """Return whether a zip checkpoint holds the tensors of `state`, as stock torch reads it."""
    with stock():
        found = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    return not different_tensors(tensors_of(state), tensors_of(found))


def _walk(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _walk(inner, f"{name}.{index}" if name else str(index))
