"""FastPersist's functions, as DeepSpeedExamples names them: a save without patching torch.

    from fastserial.integrations.fastpersist import fastpersist_save, get_aio_handle

    fastpersist_save(state, "ckpt.pt", get_aio_handle())

They write what `torch.save` writes, byte for byte, in either format, whether or not
`fastserial.install()` was called. With a `group`, its ranks write one file together. Without a
handle the configured engine is used (`threads` by default) and DeepSpeed need not be installed.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fastserial import config, distributed
from fastserial.checkpoints.save import write
from fastserial.console import say
from fastserial.engines.deepspeed.aio_op import AioSettings, load_op
from fastserial.engines.deepspeed.writer_config import FastFileWriterConfig, overrides
from fastserial.errors import ConfigError, EngineUnavailableError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "FastFileWriterConfig",
    "fastpersist_save",
    "fastpersist_save_legacy",
    "get_aio_handle",
    "get_pinned_buffer",
]

MiB = 1024 * 1024
GiB = 1024 * MiB

Statistics = dict[str, int | float | str]


def fastpersist_save(
    obj: object,
    file_path: str | os.PathLike[str],
    aio_handle: Any = None,
    pinned_buffer: torch.Tensor | None = None,
    use_gds: bool = False,
    show_stats: bool = True,
    double_buffer: bool = True,
    num_parallel_writers: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Statistics:
    """Write what `torch.save(obj, file_path)` writes (the zip format), at the disk's speed.

    Args:
        aio_handle: from `get_aio_handle`; None for the configured engine.
        pinned_buffer, double_buffer: accepted; staging memory is our own, a few blocks.
        use_gds: an error; for GPUDirect Storage there is the option `transfer="gds"`.
        show_stats: print the statistics to standard output, as DeepSpeedExamples does.
        num_parallel_writers: how many ranks of `group` write. Without a group it is ignored: the
            file is always whole. DeepSpeedExamples' default of 8 makes its legacy file one
            eighth of the data.
        group: the ranks that call this with one path and write one file together, as with
            `fastserial.distributed.save`; `torch.distributed.group.WORLD` is all ranks.

    Returns:
        `total_bytes`, `total_secs`, `total_GB/s`, `write_secs` (writing, syncing and renaming,
        without pickling), `write_GB/s`, and the statistics of DeepSpeed's FastFileWriter. Seconds,
        bytes, GiB/s.

    Raises:
        WriteError: the file cannot be written; the previous one is intact.
        EngineUnavailableError: the handle or GDS cannot be used here.
        DistributedError: with a group: any rank failed.
    """
    _refuse_gds(use_gds)
    found = overrides(aio_handle)
    if group is None:
        return _save(obj, file_path, found, show_stats, True, 2)
    with config.options(**found):
        report = distributed.save(obj, file_path, group=group, writers=num_parallel_writers)
    write_seconds = report.seconds - report.phases.get("plan", 0.0)
    return _statistics({}, report.path, report.bytes, report.seconds, write_seconds, show_stats)


def fastpersist_save_legacy(
    obj: object,
    file_path: str | os.PathLike[str],
    aio_handle: Any = None,
    pinned_buffer: torch.Tensor | None = None,
    use_gds: bool = False,
    show_stats: bool = True,
    double_buffer: bool = True,
    num_parallel_writers: int = 1,
    pickle_protocol: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Statistics:
    """Write what `torch.save(…, _use_new_zipfile_serialization=False)` writes (legacy format).

    Arguments, result and errors are those of `fastpersist_save`; but ranks write no legacy file
    together.

    Raises:
        ConfigError: a `group` is given.
    """
    del num_parallel_writers
    if group is not None:
        raise ConfigError(
            "several ranks write one file in the zip format only: call fastpersist_save(obj, "
            "file_path, group=group), whose file torch.load reads as well"
        )
    _refuse_gds(use_gds)
    found = overrides(aio_handle)
    return _save(obj, file_path, found, show_stats, False, pickle_protocol)


def _save(
    obj: object,
    file_path: str | os.PathLike[str],
    options: dict[str, Any],
    show: bool,
    zip_container: bool,
    protocol: int,
) -> Statistics:
    path = os.fspath(file_path)
    began = perf_counter()
    with config.options(**options):
        writer = write(obj, path, zip_container=zip_container, pickle_protocol=protocol)
    seconds = perf_counter() - began
    if writer is None or writer.report is None:  # torch wrote the file
        return _statistics({}, path, os.path.getsize(path), seconds, seconds, show)
    report = writer.report
    write_seconds = report.seconds - report.phases["serialize"]
    return _statistics(writer.get_stats(), path, report.bytes, seconds, write_seconds, show)


def _refuse_gds(use_gds: bool) -> None:
    if use_gds:
        raise EngineUnavailableError(
            'use_gds needs a handle of DeepSpeed; for GPUDirect Storage set transfer="gds"'
        )


def _statistics(
    statistics: Statistics, path: str, nbytes: int, seconds: float, write_seconds: float, show: bool
) -> Statistics:
    """Return statistics of a save; `write_seconds` is the time without pickling (seconds)."""
    statistics |= {
        "path": path,
        "write_secs": write_seconds,
        "write_GB/s": nbytes / write_seconds / GiB if write_seconds else 0.0,
        "total_bytes": nbytes,
        "total_secs": seconds,
        "total_GB/s": nbytes / seconds / GiB if seconds else 0.0,
    }
    if show:
        say(f"stats = {statistics}")
    return statistics


def get_aio_handle(
    block_size: int = 16 * MiB,
    queue_depth: int = 64,
    single_submit: bool = False,
    overlap_events: bool = True,
    intra_op_parallelism: int = 4,
) -> Any:
    """Return DeepSpeed's `aio_handle` with these settings, for any number of saves.

    Args:
        block_size: bytes of one kernel request.
        queue_depth: kernel requests in flight per thread.
        intra_op_parallelism: threads that share each transfer.

    Raises:
        EngineUnavailableError: DeepSpeed's op cannot run here; says what is missing.
    """
    settings = AioSettings(
        block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
    )
    return load_op().aio_handle(**asdict(settings))


def get_pinned_buffer(
    size_mb: int = 256, use_gds: bool = False, gds_handle: Any = None
) -> torch.Tensor:
    """Return a byte tensor of `size_mb` MiB, pinned where there is a GPU.

    The functions here accept one and have no use for it.

    Raises:
        ConfigError: `size_mb` is not a whole number, or less than 1.
        EngineUnavailableError: `use_gds`, as `fastpersist_save`.
    """
    if not isinstance(size_mb, int) or size_mb < 1:
        raise ConfigError(f"size_mb must be a whole number of MiB from 1 on, not {size_mb!r}")
    _refuse_gds(use_gds or gds_handle is not None)
    return torch.zeros(size_mb * MiB, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
