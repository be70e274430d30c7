"""What the benchmarks save: seeded random bytes in tensors of mixed sizes and types."""

from __future__ import annotations

import random

import torch

from fastserial.bench.errors import BenchError
from fastserial.bench.meminfo import meminfo
from fastserial.report import format_bytes

__all__ = ["check_memory", "many_small", "mixed_state", "one_small", "tensor_sizes"]

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


def check_memory(nbytes: int) -> None:
    """Refuse what would not fit into memory.

    Raises:
        BenchError: less than `nbytes` and some are available.
    """
    available = meminfo().get("MemAvailable", nbytes + _SPARE)
    if available < nbytes + _SPARE:
        raise BenchError(
            f"the data takes {format_bytes(nbytes)} of memory and {format_bytes(available)} are "
            "available: give a smaller --size"
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


def many_small(count: int = 20_000, nbytes: int = 4096, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a state dict of many tensors of `nbytes` bytes, each with its own storage."""
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": torch.rand(nbytes // 4, generator=generator) for i in range(count)}


def one_small(nbytes: int = 1024, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a state dict of one tensor of `nbytes` bytes."""
    return many_small(1, nbytes, seed)
