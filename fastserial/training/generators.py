"""The states of the random generators, as values that `weights_only` loads."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from fastserial.memory.storages import bytes_at

__all__ = ["generator_states", "portable", "restore_generators"]


def generator_states() -> dict[str, Any]:
    """Return the states of Python's, torch's, NumPy's and CUDA's generators."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    cuda: Any = torch.cuda
    if cuda.is_initialized():  # to ask whether there is a GPU would begin CUDA
        states["cuda"] = cuda.get_rng_state_all()
    return states


def restore_generators(states: Mapping[str, Any]) -> None:
    """Give the generators their states back, as far as they are there."""
    random.setstate(states["python"])
    torch.set_rng_state(_tensor(states["torch"], torch.uint8))
    if "numpy" in states:
        try:
            import numpy
        except ImportError:  # then nothing here draws from it
            pass
        else:
            name, keys, *rest = states["numpy"]
            keys = _tensor(keys, torch.int64).numpy().astype("uint32")
            numpy.random.set_state((name, keys, *rest))
    if "cuda" in states and torch.cuda.is_available():
        count = torch.cuda.device_count()
        found = [_tensor(state, torch.uint8) for state in states["cuda"][:count]]
        torch.cuda.set_rng_state_all(found)


def portable(value: Any) -> Any:
    """Return states with bytes in the place of tensors, which a job's ranks need not all have."""
    if isinstance(value, torch.Tensor):
        return bytes_at(value.data_ptr(), value.nbytes)
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(portable(item) for item in value)
    return value


def _tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.frombuffer(bytearray(value), dtype=dtype)
