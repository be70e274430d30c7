"""Folders of torch_checkpointing, which have a file for each item and rank.

Its `CheckpointManager` makes a folder for each checkpoint, with files such as `model_0.pt`. If an
item can be resharded, a `metadata.pkl` has the number of ranks. Without it, the files might be
those of epochs.
"""

from __future__ import annotations

import os
import re

from fastserial.errors import CorruptCheckpointError
from fastserial.formats.dcp import METADATA_NAME
from fastserial.formats.pickles import Mapping, decode
from fastserial.formats.source import ByteStream, DescriptorSource, naming
from fastserial.interrupts import Descriptors

__all__ = ["METADATA", "rank_count", "ranks_of_items"]

METADATA = "metadata.pkl"
_FILE = re.compile(r"([A-Za-z0-9_-]+)_(0|[1-9][0-9]*)\.pt")
_NOT_ITS = (".pt", ".pth", ".ckpt", ".bin", ".distcp", ".safetensors", ".safetensors.index.json")


def ranks_of_items(path: str | os.PathLike[str]) -> dict[str, set[int]]:
    """Return the ranks that have a file of each item in a folder; nothing of any other folder.

    Every checkpoint file in it is called `{item}_{rank}.pt`, and more than half of the ranks have
    one.
    """
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if not entry.is_dir())
    except OSError:
        return {}
    items: dict[str, set[int]] = {}
    for name in names:
        match = _FILE.fullmatch(name)
        if match is not None:
            items.setdefault(match[1], set()).add(int(match[2]))
        elif name.lower().endswith(_NOT_ITS) or METADATA_NAME.fullmatch(name):
            return {}
    ranks = set().union(*items.values())
    return items if 2 * len(ranks) > max(ranks, default=0) + 1 else {}


def rank_count(path: str) -> int:
    """Return the number of ranks that a `metadata.pkl` has.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it has opcodes that are not read.
        PickleLimitError: it takes too long to read.
        OSError: it cannot be read.
    """
    with naming(path), Descriptors() as files:
        fd = files.open(path, os.O_RDONLY | os.O_NONBLOCK)
        value = decode(ByteStream(DescriptorSource(fd))).value
    pairs = value.items if isinstance(value, Mapping) else []
    count = next((number for key, number in pairs if key == "world_size"), None)
    if type(count) is not int or count < 1:
        raise CorruptCheckpointError("it does not say how many ranks there are", path=path)
    return count
