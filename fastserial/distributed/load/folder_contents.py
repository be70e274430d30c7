"""What is in a folder of torch.distributed.checkpoint, whoever saved it; without tensors' bytes.

`.metadata` is parsed, never unpickled; values are unpickled by the rules of `weights_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from fastserial.distributed.layout.file_index import (
    FileIndex,
    FileTensor,
    fingerprint,
    is_plain_tuple,
    without_bytes,
)
from fastserial.distributed.load.files import StoredFiles
from fastserial.distributed.load.matching import file_leaves
from fastserial.errors import ConvertError, CorruptCheckpointError
from fastserial.formats.container import FolderContainer
from fastserial.formats.dcp import METADATA, Metadata, parse
from fastserial.formats.source import read_exactly
from fastserial.formats.stored import StoredTensor
from fastserial.interrupts import ours
from fastserial.nests import is_container


def index_of_folder(files: StoredFiles, between: Callable[[], None]) -> FileIndex:
    """Read what is in a folder, as `index_of_file`.

    Args:
        files: of the folder.
        between: called again and again.

    Raises:
        CorruptCheckpointError: `.metadata` is damaged, or there is none.
        ConvertError: its entries cannot be in one nest.
        UnreadableCheckpointError: `.metadata` is no regular file.
        CheckpointReplacedError: another save completed meanwhile.
        OSError: a file cannot be read.
    """
    try:
        whole = files.open(METADATA)
    except ours(FileNotFoundError):
        FolderContainer(files.path).of_all_ranks()  # may know why
        raise
    files.completed, size = (whole.name, whole.stamp), whole.size
    version = fingerprint(whole.fd, size, size)
    found = parse(read_exactly(whole.fd, 0, size), whole.name)
    try:
        values, problems, verified = values_of(found, files, between)
    except ours(CorruptCheckpointError) as error:
        return FileIndex("dcp", size, version, None, damage=str(error))
    unloaded = {key: FileTensor(-1, torch.uint8, (), (), (), why) for key, why in problems.items()}
    flat = without_bytes(values | unloaded, None)
    used = [one.number for _, one in file_leaves(flat) if isinstance(one, FileTensor)]
    for number, (key, stored) in enumerate(found.tensors.items(), 1 + max(used, default=-1)):
        dtype = getattr(torch, stored.dtype, torch.uint8)
        chunks = stored.chunks if stored.numel else ()
        problem = problem_of(stored)
        flat[key] = FileTensor(number, dtype, stored.shape, chunks, (), problem, number)
    names = sorted({chunk.file for chunk in found.items()})
    value = nested(flat, found.paths)
    return FileIndex("dcp", size, version, value, (), tuple(names), "", verified)


def problem_of(stored: StoredTensor) -> str | None:
    """Return why a tensor cannot be read here, None if it can."""
    if not isinstance(getattr(torch, stored.dtype, None), torch.dtype):
        return f"this torch has no dtype {stored.dtype}"
    if any(chunk.is_extended for chunk in stored.chunks):
        return "it went through an extension: load it with dcp.load"
    if stored.dtype.startswith(("quint", "qint")):
        return "in the folder it is quantized"
    return None


def values_of(
    found: Metadata, files: StoredFiles, between: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], dict[str, str], bool]:
    """Return the values by their keys, and why others cannot be loaded.

    Returns:
        Both, and whether all values were compared with checksums (option `verify_on_load`).

    Raises:
        CorruptCheckpointError: one is damaged.
        OSError: a file cannot be read.
    """
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    verified = verify = files.config.verify_on_load
    for key, chunk in found.values.items():
        between()
        data = files.data_of(chunk)
        if verify:
            verified &= files.is_sound(chunk, data)
        try:
            values[key] = files.value_of(chunk, data)
        except ours(ConvertError) as error:
            problems[key] = str(error)
    files.check_unchanged()
    return values, problems, verified


def nested(found: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> Any:
    """Return the nest of dictionaries and lists in which values were before they were flattened.

    Raises:
        ConvertError: two of them cannot be in one nest.
    """
    flat = {key: found[key] for key in dict.fromkeys([*paths, *found]) if key in found}
    places = {key: paths.get(key, (key,)) for key in flat}
    leaves = set(places.values())
    for key, path in places.items():
        if any(path[:length] in leaves for length in range(1, len(path))):
            raise ConvertError(f"entry {key!r} is in another entry that is a plain value")
    try:
        return unflatten_state_dict(flat, cast("Any", places))
    except ours(AttributeError, LookupError, TypeError) as error:
        raise ConvertError(f"{paths}: one of these is a list and a dictionary") from error


def number_keys(there: Any, into: Any) -> None:
    """Turn keys that are no text in `into`, or in an optimizer's state, into what they were.

    In folders they are text.
    """
    seen: set[int] = set()

    def visit(there: Any, into: Any, is_state: bool) -> None:
        if id(there) in seen or not is_container(there):
            return
        seen.add(id(there))
        if isinstance(there, MutableMapping):
            wanted: Any = into if isinstance(into, Mapping) and is_container(into) else {}
            numbers: dict[str, Any] = {}
            if any(type(key) is int for key in wanted) or (is_state and not wanted):
                numbers = {key: int(key) for key in there if _is_number(key) and key not in wanted}
            others = [key for key in wanted if not isinstance(key, str) and key not in there]
            numbers |= {str(key): key for key in others}
            if not numbers.keys().isdisjoint(there):
                held = list(there.items())
                there.clear()
                for key, item in held:
                    there[numbers.get(key, key)] = item
            is_optimizer = {"state", "param_groups"} <= there.keys()
            for key, item in there.items():
                visit(item, wanted.get(key), is_optimizer and key == "state")
        elif isinstance(there, list) or is_plain_tuple(there):
            items = into if isinstance(into, list | tuple) else ()
            for at, item in enumerate(there):
                visit(item, items[at] if at < len(items) else None, False)

    visit(there, into, False)


def _is_number(key: Any) -> bool:
    return type(key) is str and key.isascii() and key.isdecimal() and str(int(key)) == key
