"""DeepSpeed's FastFileWriterConfig, understood by our FastFileWriter.

Its handle gives the settings of the engine `deepspeed`; its pinned tensor is the staging memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fastserial.config import MAX_BLOCK, Config, current
from fastserial.config.performance import PAGE
from fastserial.engines.deepspeed.aio_op import AioSettings
from fastserial.engines.deepspeed.engine import DeepSpeedEngine
from fastserial.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["FastFileWriterConfig", "WriterOptions", "options_of", "overrides"]

MiB = 1024 * 1024
_MOST_BLOCKS = 16
_LEAST_BLOCK = 4 * MiB


class WriterOptions(Protocol):
    """The fields of DeepSpeed's `FastFileWriterConfig`."""

    @property
    def dnvme_handle(self) -> Any: ...
    @property
    def pinned_tensor(self) -> torch.Tensor | None: ...
    @property
    def double_buffer(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class FastFileWriterConfig:
    """What DeepSpeed's class of this name holds, for use without DeepSpeed's.

    Attributes:
        dnvme_handle: an `aio_handle`; None for the engine in force (`install`, `options`).
        pinned_tensor: staging memory; None for memory of our own.
        double_buffer: fill one half of the memory while the other half is written.
        num_parallel_writers, writer_rank, global_rank: accepted. Each of our writers writes the
            whole of what it is given, so every file can be loaded by itself; DeepSpeed's writes
            one part of `num_parallel_writers`.
    """

    dnvme_handle: Any = None
    pinned_tensor: torch.Tensor | None = None
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


def options_of(options: WriterOptions) -> Config:
    """Return our options for DeepSpeed's: those in force, with its handle and memory.

    Raises:
        ConfigError: as `overrides`.
    """
    return replace(current(), **overrides(options))


def overrides(options: WriterOptions) -> dict[str, Any]:
    """Return the options that DeepSpeed's handle and memory set.

    The handle has the settings; the writer uses handles of its own, so that any number of
    writers may be given the same one.

    Raises:
        ConfigError: the handle is not an `aio_handle`, or the memory is less than a page.
    """
    handle, memory = options.dnvme_handle, options.pinned_tensor
    if handle is None:
        return {}
    if not hasattr(handle, "get_intra_op_parallelism") or "gds" in type(handle).__name__:
        raise ConfigError(
            f"dnvme_handle must be DeepSpeed's aio_handle, not {type(handle).__name__}; "
            "GPUDirect Storage is not supported"
        )
    settings = AioSettings.of(handle)
    engine = partial(
        DeepSpeedEngine, settings=settings, memory=memory, double_buffer=options.double_buffer
    )
    found = {"engine": engine, "threads": settings.intra_op_parallelism}
    if memory is None:
        return found
    halves = 2 if options.double_buffer else 1
    count, block = _division(memory, halves, settings.intra_op_parallelism)
    return {**found, "queue_depth": count, "block_size": block}


def _division(memory: torch.Tensor, halves: int, parallelism: int) -> tuple[int, int]:
    """Return how many blocks staging memory is divided into, and their bytes.

    At least one for each half, each dividing into whole pages for every thread.
    """
    nbytes = max(0, memory.nbytes - -memory.data_ptr() % PAGE)
    count = min(max(halves, nbytes // _LEAST_BLOCK), _MOST_BLOCKS)
    unit = PAGE * parallelism
    block = nbytes // count
    block -= block % (unit if block >= unit else PAGE)
    if not block:
        raise ConfigError(f"a pinned_tensor of {memory.nbytes} bytes is too small to stage blocks")
    return count, min(block, MAX_BLOCK)
