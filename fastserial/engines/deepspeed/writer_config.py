"""DeepSpeed's FastFileWriterConfig, understood by our FastFileWriter.

Its handle gives the settings of the engine `deepspeed`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fastserial.config import Config, current
from fastserial.engines.deepspeed.aio_op import AioSettings
from fastserial.engines.deepspeed.engine import DeepSpeedEngine
from fastserial.errors import ConfigError

if TYPE_CHECKING:
    import torch


class WriterOptions(Protocol):
    """What is read of DeepSpeed's `FastFileWriterConfig`."""

    @property
    def dnvme_handle(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class FastFileWriterConfig:
    """What DeepSpeed's class of this name holds, for use without DeepSpeed's.

    Attributes:
        dnvme_handle: an `aio_handle`; None for the engine in force (`install`, `options`).
        pinned_tensor, double_buffer: accepted. Our writers have staging memory of their own, a few
            blocks, of which some are filled while others are written.
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
    """Return our options for DeepSpeed's: those in force, with its handle's settings.

    Raises:
        ConfigError: as `overrides`.
    """
    return replace(current(), **overrides(options.dnvme_handle))


def overrides(handle: Any) -> dict[str, Any]:
    """Return the options that DeepSpeed's handle sets; none without one.

    The writer uses handles of its own, so that any number of writers may be given the same one.

    Raises:
        ConfigError: the handle is not an `aio_handle`.
    """
    if handle is None:
        return {}
    if not hasattr(handle, "get_intra_op_parallelism") or "gds" in type(handle).__name__:
        raise ConfigError(
            f"dnvme_handle must be DeepSpeed's aio_handle, not {type(handle).__name__}; "
            "GPUDirect Storage is not supported"
        )
    settings = AioSettings.of(handle)
    engine = partial(DeepSpeedEngine, settings=settings)
    return {"engine": engine, "threads": settings.intra_op_parallelism}
