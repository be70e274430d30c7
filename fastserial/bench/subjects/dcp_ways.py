"""Ways to save and load with torch.distributed.checkpoint on many ranks: stock's, and ours.

All are durable: files, and the entries of the folder.
"""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fastserial.bench.subjects.saving import stock
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)

__all__ = ["Way", "our_way", "stock_ways"]

_COPY_AHEAD = 100_000_000  # ten times what is ahead by default (bytes)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to save and load.

    Attributes:
        name: of it.
        writer, reader: make the storage for a folder.
        save_planner, load_planner: make planners.
        around: what is in force meanwhile.
        synced: the writer syncs its folder, too.
        anew: each save is planned as the first one is.
    """

    name: str
    writer: Callable[[Path], Any]
    reader: Callable[[Path], Any]
    save_planner: Callable[[], Any]
    load_planner: Callable[[], Any]
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    synced: bool = True
    anew: bool = False

    def save(
        self, state: dict[str, Any], folder: Path, group: Any, wait_for_plans: bool = False
    ) -> float:
        """Save, on all ranks of a group; return the seconds until data were to be written.

        Args:
            wait_for_plans: no rank writes before all have planned: with fewer cores than ranks
                those that write would keep others from planning.
        """
        planned: list[float] = []
        writer = self.writer(folder)
        write_data = writer.write_data

        def when_planned(*args: Any) -> Any:
            planned.append(time.perf_counter() - began)
            if wait_for_plans:
                dist.barrier(group)
            return write_data(*args)

        writer.write_data = when_planned
        with self.around(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            save(
                state,
                storage_writer=writer,
                planner=self.save_planner(),
                process_group=group,
            )
        if not self.synced and dist.get_rank() == 0:
            _sync_folder(folder)
        return planned[0]

    def load(self, state: dict[str, Any], folder: Path) -> None:
        """Load into a state, on all ranks."""
        with self.around(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(state, storage_reader=self.reader(folder), planner=self.load_planner())


def our_way(format: Literal["dcp", "packed"], anew: bool = False) -> Way:
    """Return fastserial's storage and planners."""
    return Way(
        f'fastserial, "{format}"{", first save" * anew}',
        lambda path: FastStorageWriter(path, format=format),
        FastStorageReader,
        FastSavePlanner,
        FastLoadPlanner,
        anew=anew,
    )


def stock_ways(name: str, settings: bool) -> list[Way]:
    """Return stock's storage and planners.

    Args:
        name: of it as it comes.
        settings: also with its settings for the storage; else with those of its planner.
    """
    plain = _stock_way(name)
    if not settings:
        if "enable_plan_caching" not in inspect.signature(DefaultSavePlanner).parameters:
            return [plain]

        def caching() -> Any:
            return DefaultSavePlanner(enable_plan_caching=True)

        return [plain, _stock_way(f"{name}, plan caching", planner=caching)]
    return [
        plain,
        _stock_way(f"{name}, 2 threads", thread_count=2),
        _stock_way(f"{name}, CRC off", crc=False),
        _stock_way(f"{name}, 2 threads, CRC off", crc=False, thread_count=2),
        _stock_way(f"{name}, copies ahead", per_thread_copy_ahead=_COPY_AHEAD),
    ]


def _stock_way(
    name: str,
    crc: bool = True,
    planner: Callable[[], Any] = DefaultSavePlanner,
    **settings: Any,
) -> Way:
    return Way(
        name,
        lambda path: FileSystemWriter(path, **settings),
        FileSystemReader,
        planner,
        DefaultLoadPlanner,
        around=lambda: stock(crc),
        synced=False,
    )


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
