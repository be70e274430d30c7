"""Our storage and planners, made as stock's are.

Each tells that it is used, where nothing of ours looks at who overrides or calls what: a planner
that overrides `finish_plan` plans as stock does.
"""

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
        super().__init__(path, overwrite=overwrite)

    def set_up_storage_writer(self, *args: Any, **named: Any) -> None:
        _told("saves")
        super().set_up_storage_writer(*args, **named)


class FileSystemReader(FastStorageReader):
    def set_up_storage_reader(self, *args: Any, **named: Any) -> None:
        _told("loads")
        super().set_up_storage_reader(*args, **named)


class DefaultSavePlanner(FastSavePlanner):
    def set_up_planner(self, *args: Any, **named: Any) -> None:
        unlike = type(self) is DefaultSavePlanner and self._plans_as_stock
        _told("plans a save as stock does" if unlike else "plans a save")
        super().set_up_planner(*args, **named)


class DefaultLoadPlanner(FastLoadPlanner):
    def set_up_planner(self, *args: Any, **named: Any) -> None:
        _told("plans a load")
        super().set_up_planner(*args, **named)
