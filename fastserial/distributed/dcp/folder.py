"""The folder of a checkpoint: the old files stay until `.metadata` names the new ones.

A save never writes to a file that a checkpoint in the folder needs: each rank uses an unused name.
`.metadata` is replaced at the end. Files that no `.metadata` names any longer are removed then, or,
if the save failed, when the next one begins.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import stat
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from fastserial.formats.dcp import METADATA, METADATA_NAME, Known, framed
from fastserial.interrupts import ours, suppress
from fastserial.memory.held_settings import paused_collection

_ATTRIBUTE = "fastserial"


def storage_info(file: str, offset: int, length: int, known: Known | None) -> Any:
    """Return what `.metadata` keeps of an item: `length` bytes at `offset` of a file."""
    info = _StorageInfo(file, offset, length)
    if known is not None:
        with contextlib.suppress(AttributeError):  # a torch whose class takes no more
            setattr(info, _ATTRIBUTE, tuple(known))
    return info


def known_of(info: Any) -> Known | None:
    """Return what the writer knew of an item, None if it was not ours."""
    found = getattr(info, _ATTRIBUTE, None)
    return Known(*found) if isinstance(found, tuple) and len(found) == len(Known._fields) else None


def encoded(metadata: Metadata) -> bytes:
    """Return the contents of the file."""
    with paused_collection():
        return framed(pickle.dumps(metadata))


_SHARD = re.compile(r"__(\d+)_\d+\.distcp", re.ASCII)
_SHARD_IN_BYTES = re.compile(rb"__\d+_\d+\.distcp")


def metadata_name(rank: int | None) -> str:
    """Return the name of the file that completes a checkpoint.

    Args:
        rank: whose checkpoint it is; None: the one of all ranks.
    """
    return METADATA if rank is None else f"__{rank}{METADATA}"


class ShardFolder:
    """The folder that a checkpoint is saved in."""

    def __init__(self, path: str) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return os.path.exists(os.path.join(self.path, name))

    def new_shard(self, prefix: str) -> str:
        """Return an unused name for a rank's next file.

        Args:
            prefix: such as `__3_`.
        """
        number = 0
        while self.has(name := f"{prefix}{number}.distcp"):
            number += 1
        return name

    def drop_lone_metadata(self) -> None:
        """Remove the `.metadata` of single ranks, once that of all ranks is in place.

        They would be used only if that of all ranks were damaged: an older checkpoint would be
        loaded without an error.
        """
        with suppress(OSError):
            for name in os.listdir(self.path):
                path = os.path.join(self.path, name)
                if name != METADATA and METADATA_NAME.fullmatch(name):
                    with suppress(OSError):
                        if stat.S_ISREG(os.lstat(path).st_mode):  # else no save wrote it
                            os.unlink(path)

    def sweep(self, rank: int | None) -> None:
        """Remove files of ranks that no `.metadata` names. Other files are ignored.

        If a `.metadata` cannot be read, nothing is removed: old files do not disturb a save.

        Args:
            rank: whose files; None: of all ranks.
        """
        try:
            names = os.listdir(self.path)
            shards = [
                name
                for name in names
                if (found := _SHARD.fullmatch(name)) and rank in (None, int(found[1]))
            ]
            needed = set(self._needed(names)) if shards else set()
        except ours(OSError, MemoryError):
            return
        for name in shards:
            if name.encode() not in needed:
                with suppress(OSError):
                    os.unlink(os.path.join(self.path, name))

    def _needed(self, names: list[str]) -> Iterator[bytes]:
        """Yield the names of files in all `.metadata`, without unpickling them."""
        for name in names:
            if METADATA_NAME.fullmatch(name):
                path = os.path.join(self.path, name)
                if stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
                    with open(path, "rb") as file:
                        yield from _SHARD_IN_BYTES.findall(file.read())
