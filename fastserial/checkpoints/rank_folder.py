"""Folders of torch_checkpointing: how they are recognized, and the rank of each file.

Its `CheckpointManager` makes a folder for each checkpoint, and in it a file for each item and rank,
`model_0.pt`. An item that can be resharded gets a `metadata.pkl`, which has the number of ranks.
Without it, the files might be those of epochs, so the caller has to say that they are of ranks.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from fastserial.errors import CorruptCheckpointError
from fastserial.formats.dcp import METADATA_NAME
from fastserial.formats.pickles import Mapping, decode
from fastserial.formats.source import ByteStream, DescriptorSource, naming
from fastserial.interrupts import Descriptors

__all__ = ["METADATA", "RANK_FOLDER", "RankFolder", "find_rank_folder", "ranks_said"]

RANK_FOLDER = "torch_checkpointing"
METADATA = "metadata.pkl"
_FILE = re.compile(r"([A-Za-z0-9_-]+)_(0|[1-9][0-9]*)\.pt")
_NOT_ITS = (".pt", ".pth", ".ckpt", ".bin", ".distcp", ".safetensors", ".safetensors.index.json")


class RankFolder(NamedTuple):
    """What is in a folder.

    Attributes:
        items: for each item, by name, the file of each rank that has one, by rank.
        ranks: how many ranks there are.
        metadata: name of the file with their number, None if there is none.
        others: names of files that belong to no item, such as those in JSON.
    """

    items: dict[str, dict[int, str]]
    ranks: int
    metadata: str | None
    others: list[str]

    @property
    def files(self) -> list[str]:
        """The names of all files of items, item by item."""
        return [name for files in self.items.values() for name in files.values()]


def find_rank_folder(path: str | os.PathLike[str], by_name: bool = False) -> RankFolder | None:
    """Return the files of a folder that torch_checkpointing saved to; None of any other folder.

    Every checkpoint file in it is called `{item}_{rank}.pt`, and more than half of the ranks have
    one.

    Args:
        path: the folder.
        by_name: its files are of ranks, although there is no `metadata.pkl`.
    """
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if not entry.is_dir())
    except OSError:
        return None
    if METADATA not in names and not by_name:
        return None
    items: dict[str, dict[int, str]] = {}
    others: list[str] = []
    for name in names:
        match = _FILE.fullmatch(name)
        if match is not None:
            items.setdefault(match[1], {})[int(match[2])] = name
        elif name.lower().endswith(_NOT_ITS) or METADATA_NAME.fullmatch(name):
            return None
        elif name != METADATA:
            others.append(name)
    ranks = {rank for files in items.values() for rank in files}
    count = max(ranks, default=-1) + 1
    if 2 * len(ranks) <= count or not ranks:
        return None
    items = {item: dict(sorted(files.items())) for item, files in items.items()}
    return RankFolder(items, count, METADATA if METADATA in names else None, others)


def ranks_said(path: str, found: RankFolder) -> int | None:
    """Return the number of ranks in `metadata.pkl`; None if there is no such file.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it has opcodes that are not read.
        PickleLimitError: it takes too long to read.
        OSError: it cannot be read.
    """
    if found.metadata is None:
        return None
    name = os.path.join(path, found.metadata)
    with naming(name), Descriptors() as files:
        fd = files.open(name, os.O_RDONLY | os.O_NONBLOCK)
        value = decode(ByteStream(DescriptorSource(fd))).value
    pairs = value.items if isinstance(value, Mapping) else []
    said = next((number for key, number in pairs if key == "world_size"), None)
    if type(said) is not int or said < 1:
        raise CorruptCheckpointError("it does not say how many ranks there are", path=name)
    return said
