"""Lists of files that belong together: whether all of them exist.

`fastserial_complete.json` (of `CheckpointCallback`) names the files of a checkpoint with their
sizes; the index of Hugging Face's shards names the file of each tensor; `metadata.pkl` of
torch_checkpointing says how many ranks saved.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from fastserial.checkpoints.rank_folder import METADATA, rank_count, ranks_of_items
from fastserial.checkpoints.verify.report import Findings, Problem
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.safetensors import read_header
from fastserial.formats.source import DescriptorSource
from fastserial.interrupts import Descriptors

__all__ = ["FILE_LIST", "MARK", "file_lists_in", "is_file_list", "verify_file_list"]

FILE_LIST = "file list"
MARK = "fastserial_complete.json"
_INDICES = (".safetensors.index.json", ".bin.index.json")
_MOST = 1 << 30  # bytes of a list


def is_file_list(path: str) -> bool:
    """Return whether a file has the name of a list of files."""
    folder, name = os.path.split(path)
    if name == METADATA:
        return bool(ranks_of_items(folder or os.curdir))
    return name == MARK or name.endswith(_INDICES)


def file_lists_in(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lists in a folder and those below, sorted."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        yield from filter(is_file_list, (os.path.join(parent, name) for name in sorted(files)))


def verify_file_list(fd: int, path: str, findings: Findings) -> int:
    """Check that the files that a list names exist, with the sizes or tensors that it gives.

    Args:
        fd: the list.
        path: its path; the files are in the same folder, or below.
        findings: gets the problems; each names its file.

    Returns:
        How many files it names.

    Raises:
        CorruptCheckpointError: it is no such list.
        UnreadableCheckpointError, PickleLimitError: it is a pickle that is not read.
        OSError: it cannot be read.
    """
    folder = os.path.dirname(path)
    if os.path.basename(path) == METADATA:
        return _check_ranks(path, findings)
    with open(fd, "rb", closefd=False) as file:
        text = file.read(_MOST)
    key = "files" if os.path.basename(path) == MARK else "weight_map"
    try:
        entries: Any = json.loads(text)[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        entries = ""
    if entries is None:  # `CheckpointCallback` writes this while it overwrites the folder
        raise CorruptCheckpointError("a save to this folder was begun and not completed")
    if not isinstance(entries, dict):
        raise CorruptCheckpointError(f"it is no list of files: it has no object {key!r}")
    sizes: dict[str, Any] = entries if key == "files" else {}
    keys_of: dict[str, list[str]] = {name: [] for name in sizes}
    if key != "files":
        for tensor, name in entries.items():
            keys_of.setdefault(str(name), []).append(tensor)
    for name, keys in sorted(keys_of.items()):
        for kind, message, tensors in _problems(os.path.join(folder, name), sizes.get(name), keys):
            findings.add(Problem(kind, message, None, None, tuple(tensors), name))
    return len(keys_of)


def _check_ranks(path: str, findings: Findings) -> int:
    """Compare the files of ranks with the number of ranks in `metadata.pkl`."""
    items, count = ranks_of_items(os.path.dirname(path) or os.curdir), rank_count(path)
    there = set().union(*items.values())
    if there != set(range(count)):
        text = f"it was saved by {count} ranks, and there are files of {len(there)}"
        findings.add(Problem("missing", text, file=METADATA))
    for item, ranks in items.items():
        lacking = ", ".join(map(str, sorted(there - ranks)))
        if lacking:  # as a program may save it
            findings.note(f"{item}: there is no file of rank {lacking}")
    return sum(map(len, items.values()))


def _problems(path: str, size: Any, keys: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield what is wrong with a file: the kind of problem, its text, the tensors concerned.

    Args:
        path: of the file.
        size: that it must have (bytes), None if the list gives none.
        keys: of the tensors that it must have.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        what = "it is not there" if isinstance(error, FileNotFoundError) else f"unreadable: {error}"
        yield "missing", what, keys
        return
    if not stat.S_ISREG(found.st_mode):
        yield "missing", "it is no regular file", keys
    elif size is not None and found.st_size != size:
        kind = "truncated" if type(size) is int and found.st_size < size else "unaccounted"
        text = f"it has {found.st_size} bytes, and had {size} when the checkpoint was complete"
        yield kind, text, []
    elif keys and path.endswith(".safetensors"):
        try:
            with Descriptors() as opened:
                fd = opened.open(path, os.O_RDONLY | os.O_NONBLOCK)
                there = read_header(DescriptorSource(fd)).outline.storages
        except (OSError, CorruptCheckpointError):
            return  # the file has a report of its own
        lacking = [key for key in keys if key not in there]
        if lacking:
            text = f"{len(lacking)} of the tensors that the index names are not in the file"
            yield "missing", text, lacking
