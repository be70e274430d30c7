"""Lists of files that belong together: whether all of them exist.

`fastserial_complete.json` (of `CheckpointCallback`) names the files of a checkpoint with their
sizes; the index of Hugging Face's shards names the file of each tensor.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

from fastserial.checkpoints.verify.report import Problem, VerifyReport
from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError
from fastserial.formats.bounded_json import parse_json
from fastserial.formats.safetensors import read_header
from fastserial.formats.source import DescriptorSource, naming
from fastserial.interrupts import Descriptors, ours

FILE_LIST = "file list"
MARK = "fastserial_complete.json"
_INDICES = (".safetensors.index.json", ".bin.index.json")
_MOST = 1 << 25  # bytes of a list, which takes up to 20 times as much memory


def is_file_list(path: str) -> bool:
    """Return whether a file has the name of a list of files."""
    return os.path.basename(path) == MARK or path.endswith(_INDICES)


def file_lists_in(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lists in a folder and those below, sorted."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        yield from filter(is_file_list, (os.path.join(parent, name) for name in sorted(files)))


def _read_object(fd: int, key: str) -> dict[str, Any]:
    """Return the object under a key of a JSON file.

    Raises:
        CorruptCheckpointError: there is none.
        UnreadableCheckpointError: it is too large, or not a regular file.
        OSError: the file cannot be read.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise UnreadableCheckpointError("not a regular file")
    with open(fd, "rb", closefd=False) as file:
        text = file.read(_MOST + 1)
    if len(text) > _MOST:
        raise UnreadableCheckpointError(f"a list of files larger than {_MOST} bytes")
    try:
        found: Any = parse_json(text)[key]
    except ours(ValueError, KeyError, TypeError, RecursionError):
        found = ""
    if found is None:  # `CheckpointCallback` writes this while it overwrites the folder
        raise CorruptCheckpointError("a save to this folder was begun and not completed")
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"it is no list of files: it has no object {key!r}")
    return found


def keys_of_files(fd: int) -> dict[str, list[str]]:
    """Return the keys of the tensors in each file that an index of shards names.

    Raises:
        CorruptCheckpointError: it is no such index.
        UnreadableCheckpointError: it is too large, or not a regular file.
        OSError: it cannot be read.
    """
    keys: dict[str, list[str]] = {}
    for key, name in _read_object(fd, "weight_map").items():
        keys.setdefault(str(name), []).append(key)
    return keys


def read_index(path: str) -> dict[str, list[str]]:
    """Return the keys of the tensors in each file of an index; all files are in its folder.

    Raises:
        CorruptCheckpointError: it is no such index, or names a file elsewhere.
        UnreadableCheckpointError: it is too large, or not a regular file.
        OSError: it cannot be read.
    """
    with naming(path), Descriptors() as opened:
        files = keys_of_files(opened.open(path, os.O_RDONLY | os.O_NONBLOCK))
    for name in files:
        if not is_file_name(name):
            text = f"it names {name!r}, which is not in its folder"
            raise CorruptCheckpointError(text, path=path)
    return files


def is_file_name(name: str) -> bool:
    """Return whether a file in a folder can have a name: no path, no byte that no name has."""
    try:
        plain = os.path.basename(os.fsencode(name))
    except UnicodeEncodeError:  # lone surrogates
        return False
    return plain == os.fsencode(name) and plain not in (b"", b".", b"..") and b"\0" not in plain


def verify_file_list(fd: int, path: str, report: VerifyReport) -> None:
    """Check that the files that a list names exist, with the sizes or tensors that it gives.

    Args:
        fd: the list.
        path: its path; the files are in the same folder, or below.
        report: gets the number of files, and the problems; each names its file.

    Raises:
        CorruptCheckpointError: it is no such list.
        UnreadableCheckpointError: it is too large.
        OSError: it cannot be read.
    """
    report.format = FILE_LIST
    folder, name = os.path.split(path)
    sizes = _read_object(fd, "files") if name == MARK else {}
    files = dict.fromkeys(sizes, ()) if name == MARK else keys_of_files(fd)
    report.records = len(files)
    for file, keys in sorted(files.items()):
        for problem in _problems(folder, file, sizes.get(file), tuple(keys)):
            report.add(problem)


def _problems(folder: str, name: str, size: Any, keys: tuple[str, ...]) -> Iterator[Problem]:
    """Yield what is wrong with a file.

    Args:
        size: that it must have (bytes), None if the list gives none.
        keys: of the tensors that it must have.
    """
    path = os.path.join(folder, name)
    try:
        found = os.stat(path)
    except ours(OSError, ValueError) as error:
        text = "it is not there" if isinstance(error, FileNotFoundError) else f"unreadable: {error}"
        yield Problem("missing", text, tensors=keys, file=name)
        return
    if not stat.S_ISREG(found.st_mode):
        yield Problem("missing", "it is no regular file", tensors=keys, file=name)
    elif size is not None and found.st_size != size:
        kind = "truncated" if type(size) is int and found.st_size < size else "unaccounted"
        text = f"it has {found.st_size} bytes, and had {size} when the checkpoint was complete"
        yield Problem(kind, text, file=name)
    elif keys and path.endswith(".safetensors"):
        try:
            with Descriptors() as opened:
                fd = opened.open(path, os.O_RDONLY | os.O_NONBLOCK)
                there = read_header(DescriptorSource(fd)).outline.storages
        except ours(OSError, CorruptCheckpointError):
            return  # the file has a report of its own
        lacking = tuple(key for key in keys if key not in there)
        if lacking:
            text = f"{len(lacking)} of the tensors that the index names are not in the file"
            yield Problem("missing", text, tensors=lacking, file=name)
