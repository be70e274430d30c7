"""Our storage and planners, made as stock's are."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockWriter

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)

__all__ = ["DefaultLoadPlanner", "DefaultSavePlanner", "FileSystemReader", "FileSystemWriter"]

_FORMAT: Any = os.environ.get("FASTSERIAL_IN_PLACE_FORMAT", "dcp")
_NOT_OURS = ("_extensions", "serialization_format")  # changes the bytes: stays with stock


def _told(name: str) -> None:
    with open(os.environ["FASTSERIAL_IN_PLACE_LOG"], "a") as file:
        file.write(name + "\n")


class FileSystemWriter(FastStorageWriter):
    """What says how stock writes (threads, files for each rank) is left out."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        if any(named.get(name) for name in _NOT_OURS):
            return StockWriter(*args, **named)
        return super().__new__(cls)

    def __init__(self, path: Any, *_: Any, overwrite: bool = True, **__: Any) -> None:
        super().__init__(path, format=_FORMAT, overwrite=overwrite)

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        _told("saved")


class FileSystemReader(FastStorageReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        _told("loaded")
        return super().read_data(plan, planner)


class DefaultSavePlanner(FastSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        _told("planned a save")
        return super().finish_plan(new_plan)


class DefaultLoadPlanner(FastLoadPlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        _told("planned a load")
        return super().finish_plan(new_plan)
