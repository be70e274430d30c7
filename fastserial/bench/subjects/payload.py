"""What the benchmarks save: seeded random bytes in tensors of mixed sizes and types."""

from __future__ import annotations

import random

import torch

from fastserial.bench.measuring.errors import BenchError
from fastserial.files.meminfo import meminfo
from fastserial.reports import format_bytes

__all__ = [
    "check_memory",
    "equal_state",
    "fill",
    "many_small",
    "mixed_state",
    "one_small",
    "tensor_sizes",
]

_DECADES = 4.5  # largest to smallest tensor: an embedding beside a bias
_DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.int64)
_UNIT = 8  # bytes; a multiple of every item size
_SPARE = 1 << 30


def tensor_sizes(nbytes: int, count: int, seed: int = 0) -> list[int]:
    """Return `count` sizes (bytes, multiples of 8) that add up to about `nbytes`.

    They are spread evenly over orders of magnitude, as the tensors of a model are.
    """
    chance = random.Random(seed)
    weights = [10 ** chance.uniform(0, _DECADES) for _ in range(count)]
    scale = nbytes / sum(weights)
    return [max(_UNIT, round(weight * scale / _UNIT) * _UNIT) for weight in weights]


def check_memory(nbytes: int, advice: str = "give a smaller --size") -> None:
    """Refuse what would not fit into memory.

    Raises:
        BenchError: less than `nbytes` and some are available.
    """
    available = meminfo().get("MemAvailable", nbytes + _SPARE)
    if available < nbytes + _SPARE:
        raise BenchError(
            f"the data takes {format_bytes(nbytes)} of memory and {format_bytes(available)} are "
            f"available: {advice}"
        )


def mixed_state(nbytes: int, tensors: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a state dict of about `nbytes` bytes.

    Raises:
        BenchError: it would not fit into memory.
    """
    check_memory(nbytes)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for index, size in enumerate(tensor_sizes(nbytes, tensors, seed)):
        words = torch.empty(size // _UNIT, dtype=torch.int64)
        words.random_(generator=generator)  # any bits: also NaNs and denormals
        state[f"layers.{index}.weight"] = words.view(_DTYPES[index % len(_DTYPES)])
    return state


def equal_state(nbytes: int, tensors: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a state dict of about `nbytes` bytes in tensors of one size, 8 bytes at least.

    Raises:
        BenchError: it would not fit into memory.
    """
    check_memory(nbytes)
    generator = torch.Generator().manual_seed(seed)
    words = max(1, nbytes // tensors // _UNIT)
    data = torch.empty((tensors, words), dtype=torch.int64).random_(generator=generator)
    # clones: each has its own storage
    return {f"layers.{i}.weight": row.clone().view(torch.float32) for i, row in enumerate(data)}


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a new, contiguous tensor on the CPU with random bits, eight bytes at a time."""
    raw = tensor.view(-1).view(torch.uint8)
    whole = raw.numel() // _UNIT * _UNIT
    raw[:whole].view(torch.int64).random_(generator=generator)
    raw[whole:].random_(0, 256, generator=generator)


def many_small(count: int = 20_000, nbytes: int = 4096, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a state dict of many tensors of `nbytes` bytes, each with its own storage."""
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": torch.rand(nbytes // 4, generator=generator) for i in range(count)}


def one_small(nbytes: int = 1024, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a state dict of one tensor of `nbytes` bytes."""
    return many_small(1, nbytes, seed)
