"""Folders of torch.distributed.checkpoint: which they are, and what their `.metadata` says."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from fastserial.errors import ConvertError, CorruptCheckpointError
from fastserial.formats.dcp import METADATA_NAME, Metadata, parse
from fastserial.formats.source import DescriptorSource
from fastserial.interrupts import Descriptors

__all__ = [
    "FoundFolder",
    "all_metadata",
    "is_dcp_folder",
    "list_folder",
    "one_metadata",
    "read_metadata",
]

_SHARD = re.compile(r".*\.distcp")
_UNFINISHED = (
    "there is no `.metadata`: a save into this folder was not completed, so nothing can be loaded"
)


class FoundFolder(NamedTuple):
    """What is in a folder.

    Attributes:
        metadata: names of the files that complete a checkpoint: one, or one of each rank. Where
            there is one of all ranks, torch loads no other.
        shards: names of the files with items.
    """

    metadata: list[str]
    shards: list[str]


def list_folder(path: str) -> FoundFolder:
    """Return what is in a folder.

    Raises:
        OSError: it cannot be read.
    """
    names = sorted(os.listdir(path))
    metadata = [name for name in names if METADATA_NAME.fullmatch(name)]
    if ".metadata" in metadata:
        metadata = [".metadata"]
    return FoundFolder(metadata, [name for name in names if _SHARD.fullmatch(name)])


def is_dcp_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that torch.distributed.checkpoint saved to."""
    try:
        found = list_folder(os.fspath(path))
    except OSError:
        return False
    return bool(found.shards) or any(
        _looks_like_metadata(os.path.join(path, name)) for name in found.metadata
    )


def _looks_like_metadata(path: str) -> bool:
    try:
        with Descriptors() as files:
            head = os.pread(files.open(path, os.O_RDONLY | os.O_NONBLOCK), 1, 0)
    except OSError:
        return False
    return head == b"\x80"  # of a pickle


def read_metadata(path: str, name: str) -> Metadata:
    """Return what a `.metadata` says.

    Raises:
        CorruptCheckpointError: it is damaged.
        OSError: it cannot be read.
    """
    file_name = os.path.join(path, name)
    with open(file_name, "rb") as file:
        return parse(DescriptorSource(file.fileno()), file_name)


def all_metadata(path: str) -> dict[str, Metadata]:
    """Return what each `.metadata` of a folder says that is loaded: one, or one of each rank.

    Raises:
        CorruptCheckpointError: one is damaged, or there is none.
        OSError: one cannot be read.
    """
    found = list_folder(path)
    if not found.metadata:
        raise CorruptCheckpointError(_UNFINISHED, path=path)
    return {name: read_metadata(path, name) for name in found.metadata}


def one_metadata(path: str) -> Metadata:
    """Return what the `.metadata` of a folder says; if each rank has one, of all of them.

    Raises:
        ConvertError: ranks have the same key, each in a checkpoint of its own.
        CorruptCheckpointError: it is damaged, or there is none.
        OSError: it cannot be read.
    """
    whole, *others = all_metadata(path).values()
    for other in others:
        _join(whole, other, path)
    return whole


def _join(whole: Metadata, other: Metadata, path: str) -> None:
    """Add what another rank saved by itself."""
    twice = (whole.tensors.keys() | set(whole.values)) & (other.tensors.keys() | set(other.values))
    if twice:
        raise ConvertError(
            f"{path}: each rank saved a checkpoint of its own (use_collectives=False), and "
            f"{min(twice)!r} is in several of them: load it with torch.distributed.checkpoint"
        )
    whole.tensors.update(other.tensors)
    whole.values += other.values
    whole.paths.update(other.paths)
    whole.items += other.items
    whole.missing += other.missing
    whole.globals = tuple(sorted({*whole.globals, *other.globals}))
