"""Folders of torch_checkpointing: which they are, and which file is which rank's.

Its `CheckpointManager` makes a folder for each checkpoint, and in it a file for each item and rank,
`model_0.pt`: what `torch.save` writes to a stream. Two things say what the folder is: the shards of
DTensors, and `metadata.pkl` (how many ranks there were), which an item that can be resharded gets.
Without them, the files may as well be those of epochs that a program saved to streams.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from fastserial.errors import CheckpointFileError, CorruptCheckpointError, PickleLimitError
from fastserial.formats.byte_stream import ByteStream
from fastserial.formats.dcp import METADATA_NAME
from fastserial.formats.pickles import Mapping, decode
from fastserial.formats.tensors import zip_outline
from fastserial.formats.zip.directory import read_directory, read_exactly
from fastserial.formats.zip.structs import LOCAL, LOCAL_SIGNATURE
from fastserial.interrupts import Descriptors

__all__ = ["LOCAL_TENSOR", "RANK_FOLDER", "RankFolder", "find_rank_folder", "ranks_said"]

RANK_FOLDER = "torch_checkpointing"
_METADATA = "metadata.pkl"
_FILE = re.compile(r"([A-Za-z0-9_-]+)_(0|[1-9][0-9]*)\.pt")
_NOT_ITS = (".pt", ".pth", ".ckpt", ".bin", ".distcp", ".safetensors", ".safetensors.index.json")
LOCAL_TENSOR = "._local_tensor"  # in a DTensor
_UNSURE = "nothing in the folder says that its files are of ranks, and not of steps, say"
_OF_A_STREAM = b"archive/"  # so torch calls an archive that has no path


class RankFolder(NamedTuple):
    """What is in a folder.

    Attributes:
        items: for each item, by name, the file of each rank that has one, by rank.
        ranks: how many ranks there are.
        metadata: name of the file that says so, None if there is none.
        others: names of files that belong to no item, such as those in JSON.
        is_sure: something says that these are files of ranks.
    """

    items: dict[str, dict[int, str]]
    ranks: int
    metadata: str | None
    others: list[str]
    is_sure: bool = True

    @property
    def files(self) -> list[str]:
        """The names of all files of items, item by item."""
        return [name for files in self.items.values() for name in files.values()]

    @property
    def notes(self) -> list[str]:
        """What is not sure, and which ranks have no file of an item, as a program may save it."""
        return [_UNSURE] * (not self.is_sure) + [
            f"{item}: there is no file of rank {', '.join(map(str, sorted(lacking)))}"
            for item, files in self.items.items()
            if (lacking := set(range(self.ranks)) - files.keys())
        ]


def find_rank_folder(path: str | os.PathLike[str]) -> RankFolder | None:
    """Return what is in a folder that torch_checkpointing saved to; None if it is none of these.

    In such a folder every checkpoint file is called `{item}_{rank}.pt` and was saved to a stream;
    one item has files of all ranks, which are counted from 0 without a gap. (With a `metadata.pkl`,
    some may be missing.) They may still be those of epochs: see `is_sure`.
    """
    found = _by_name(os.fspath(path))
    if found is None:
        return None
    seen: set[bool] = set()
    for name in found.files:
        head = _head(os.path.join(path, name))
        if head is not None:
            seen.add(head)
    if seen != {True}:
        return None
    return found._replace(is_sure=found.metadata is not None or _has_shards(path, found))


def _has_shards(path: str | os.PathLike[str], found: RankFolder) -> bool:
    """Return whether an item has DTensors, in the first of its files that can be read."""
    for files in found.items.values():
        for name in files.values():
            try:
                with Descriptors() as opened:
                    fd = opened.open(os.path.join(path, name), os.O_RDONLY | os.O_NONBLOCK)
                    outline = zip_outline(fd, read_directory(fd, os.fstat(fd).st_size))
            except (OSError, CheckpointFileError, PickleLimitError):
                continue
            if outline and any(entry.key.endswith(LOCAL_TENSOR) for entry in outline.tensors):
                return True
            break
    return False


def _by_name(path: str) -> RankFolder | None:
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if not entry.is_dir())
    except OSError:
        return None
    items: dict[str, dict[int, str]] = {}
    others: list[str] = []
    for name in names:
        match = _FILE.fullmatch(name)
        if match is not None:
            items.setdefault(match[1], {})[int(match[2])] = name
        elif name.lower().endswith(_NOT_ITS) or METADATA_NAME.fullmatch(name):
            return None
        elif name != _METADATA:
            others.append(name)
    metadata = _METADATA if _METADATA in names else None
    ranks = {rank for files in items.values() for rank in files}
    count = max(ranks, default=-1) + 1
    whole = any(len(files) == count for files in items.values())
    if not (whole if metadata is None else 2 * len(ranks) > count):
        return None
    items = {item: dict(sorted(files.items())) for item, files in items.items()}
    return RankFolder(items, count, metadata, others)


def _head(path: str) -> bool | None:
    """Return whether a file starts as what was saved to a stream, None if that cannot be told."""
    try:
        with Descriptors() as files:
            fd = files.open(path, os.O_RDONLY | os.O_NONBLOCK)
            head = os.pread(fd, LOCAL.size + len(_OF_A_STREAM), 0)
    except OSError:
        return None
    if not head.startswith(LOCAL_SIGNATURE) or len(head) < LOCAL.size + len(_OF_A_STREAM):
        return None
    return head.endswith(_OF_A_STREAM)


def ranks_said(path: str, found: RankFolder) -> int | None:
    """Return how many ranks saved, as `metadata.pkl` says; None if there is none.

    Raises:
        CorruptCheckpointError: it is damaged.
        PickleLimitError: it takes too long to read.
        OSError: it cannot be read.
    """
    if found.metadata is None:
        return None
    name = os.path.join(path, found.metadata)
    try:
        with Descriptors() as files:
            fd = files.open(name, os.O_RDONLY | os.O_NONBLOCK)
            size = os.fstat(fd).st_size
            stream = ByteStream(lambda offset, length: read_exactly(fd, offset, length), 0, size)
            value = decode(stream).value
    except CorruptCheckpointError as error:
        error.path = name
        raise
    pairs = value.items if isinstance(value, Mapping) else []
    said = next((number for key, number in pairs if key == "world_size"), None)
    if type(said) is not int or said < 1:
        raise CorruptCheckpointError("it does not say how many ranks there are", path=name)
    return said
