"""What the benchmarks save, and whether two checkpoints hold the same.

Random bytes in tensors of mixed sizes; files are compared byte by byte, tensors bit by bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from collections.abc import Mapping
from pathlib import Path

import torch

from fastserial.bench.measure import BenchError
from fastserial.bench.state import check_memory
from fastserial.nests import walk
from fastserial.reports import format_bytes

_DECADES = 4.5  # largest to smallest tensor: from an embedding to a bias
_DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.int64)
_UNIT = 8  # bytes; a multiple of every item size


def tensor_sizes(nbytes: int, count: int, seed: int = 0) -> list[int]:
    """Return `count` sizes (bytes, multiples of 8) that add up to about `nbytes`.

    They are spread evenly over orders of magnitude, as the tensors of a model are.
    """
    chance = random.Random(seed)
    weights = [10 ** chance.uniform(0, _DECADES) for _ in range(count)]
    scale = nbytes / sum(weights)
    return [max(_UNIT, round(weight * scale / _UNIT) * _UNIT) for weight in weights]


def mixed_state(nbytes: int, tensors: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return a state dict of about `nbytes` bytes on a device, the same each time.

    Raises:
        BenchError: it would not fit into memory, or there is no such device.
    """
    check_memory(nbytes)
    if device != "cpu":
        check_gpu(nbytes)
    generator = torch.Generator().manual_seed(0)
    state = {}
    for index, size in enumerate(tensor_sizes(nbytes, tensors)):
        tensor = torch.empty(size, dtype=torch.uint8)
        fill(tensor, generator)  # any bits: also NaNs and denormals
        state[f"layers.{index}.weight"] = tensor.view(_DTYPES[index % len(_DTYPES)]).to(device)
    return state


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a new, contiguous tensor on the CPU with random bits, eight bytes at a time."""
    raw = tensor.view(-1).view(torch.uint8)
    whole = raw.numel() // _UNIT * _UNIT
    raw[:whole].view(torch.int64).random_(generator=generator)
    raw[whole:].random_(0, 256, generator=generator)


def check_gpu(nbytes: int = 0) -> None:
    """Check that there is a GPU with enough free memory.

    Raises:
        BenchError: there is none.
    """
    if not torch.cuda.is_available():
        raise BenchError(
            "--gpu: torch finds no CUDA device here (torch.cuda.is_available() is False); leave "
            "out --gpu, or see whether driver and CUDA build of torch are installed"
        )
    free, _ = torch.cuda.mem_get_info()
    if free < nbytes:
        raise BenchError(
            f"the data takes {format_bytes(nbytes)} of the GPU's memory and {format_bytes(free)} "
            f"are free: give a smaller --size, or a smaller model"
        )


_CHUNK = 8 << 20


def digest(path: Path) -> str:
    """Return a hash of a file's bytes, and leave none of them in the page cache."""
    hashed = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return hashed.hexdigest()


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


def _hash(tensor: torch.Tensor) -> str:
    # as bytes: a NaN equals itself then
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    data = (ctypes.c_char * len(raw)).from_address(raw.data_ptr()) if len(raw) else b""
    return hashlib.sha256(data).hexdigest()
