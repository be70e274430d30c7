"""The folder of a checkpoint: new files beside the old ones, until `.metadata` names the new ones.

A save never writes to a file that a checkpoint of the folder needs: each rank takes a name that no
file has. `.metadata` is replaced at the end; what no `.metadata` names any more is removed then,
or, if the save failed, when the next one begins.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator

from fastserial.errors import WriteError, write_error
from fastserial.files.durable import sync_folders
from fastserial.formats.dcp import METADATA_NAME

__all__ = ["METADATA", "Folder", "metadata_name"]

METADATA = ".metadata"
_SHARD = re.compile(r"__(\d+)_\d+\.distcp", re.ASCII)
_SHARD_IN_BYTES = re.compile(rb"__\d+_\d+\.distcp")


def metadata_name(rank: int | None) -> str:
    """Return the name of the file that completes a checkpoint.

    Args:
        rank: of which it is; None: of all ranks.
    """
    return METADATA if rank is None else f"__{rank}{METADATA}"


class Folder:
    """Where a checkpoint is saved."""

    def __init__(self, path: str) -> None:
        self.path = path

    def make(self, durable: bool) -> None:
        """Make the folder, and those around it, if they are not there.

        Raises:
            WriteError: it cannot be made.
        """
        missing: list[str] = []
        path = os.path.abspath(self.path)
        while not os.path.isdir(path) and path != os.path.dirname(path):
            missing.append(path)
            path = os.path.dirname(path)
        if not missing:
            return
        try:
            os.makedirs(self.path, exist_ok=True)
            if durable:
                sync_folders(missing)
        except OSError as error:
            raise _not_made(self.path, error) from error

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return os.path.exists(os.path.join(self.path, name))

    def new_shard(self, prefix: str) -> str:
        """Return a name for a rank's next file, which no file has.

        Args:
            prefix: such as `__3_`.
        """
        number = 0
        while self.has(name := f"{prefix}{number}.distcp"):
            number += 1
        return name

    def drop_lone_metadata(self) -> None:
        """Remove the `.metadata` of ranks on their own, once that of all ranks is in place.

        Nothing would load them but who finds that of all ranks damaged: an older checkpoint then,
        and no error.
        """
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                path = os.path.join(self.path, name)
                if name != METADATA and METADATA_NAME.fullmatch(name):
                    with contextlib.suppress(OSError):
                        if stat.S_ISREG(os.lstat(path).st_mode):  # else it is none of a save
                            os.unlink(path)

    def sweep(self, rank: int | None) -> None:
        """Remove files of ranks that no `.metadata` names. Nothing else is touched.

        Where that cannot be told, nothing is removed: leftovers harm no save.

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
        except (OSError, MemoryError):
            return
        for name in shards:
            if name.encode() not in needed:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.path, name))

    def _needed(self, names: list[str]) -> Iterator[bytes]:
        """Yield the names of files in all `.metadata`, which are not unpickled for that."""
        for name in names:
            if METADATA_NAME.fullmatch(name):
                path = os.path.join(self.path, name)
                if stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
                    with open(path, "rb") as file:
                        yield from _SHARD_IN_BYTES.findall(file.read())


def _not_made(path: str, error: OSError) -> WriteError:
    return write_error(error.errno or 0, path, f"the folder cannot be made: {error.strerror}")
