"""Whether two checkpoints hold the same: file by file, tensor by tensor, bit by bit."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from fastserial.nests import walk

_CHUNK = 8 << 20


def digest(path: Path) -> str:
    """Return a hash of a file's bytes, and leave none of them in the page cache."""
    hashed = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return hashed.hexdigest()


def different_tensors(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the names of tensors that are missing on one side or differ in type or bits."""
    mine, theirs = fingerprints(one), fingerprints(other)
    names = dict.fromkeys([*mine, *theirs])
    return [name for name in names if mine.get(name) != theirs.get(name)]


def fingerprints(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return type, shape and a hash of the bits of each tensor: equal if these are."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {_hash(tensor)}"
        for name, tensor in state.items()
    }


def tensors_of(state: object) -> dict[str, torch.Tensor]:
    """Return the tensors of nested mappings and lists, by their dotted names."""
    return {
        ".".join(map(str, path)): value
        for path, value in walk(state)
        if isinstance(value, torch.Tensor)
    }


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


def _hash(tensor: torch.Tensor) -> str:
    # as bytes: a NaN equals itself then
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    data = (ctypes.c_char * len(raw)).from_address(raw.data_ptr()) if len(raw) else b""
    return hashlib.sha256(data).hexdigest()
