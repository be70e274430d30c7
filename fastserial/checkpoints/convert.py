"""`fastserial.convert`: a checkpoint in another container, streamed from file to file.

Pickles are read under torch's `weights_only` rules. Storages are never loaded: the writer fetches
their bytes from the source while it fills its staging buffers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastserial.checkpoints.mapped_source import INDEX, Source, open_source
from fastserial.checkpoints.safetensors_shards import write_shards
from fastserial.checkpoints.streaming import (
    StreamWriter,
    flat_tensors,
    refuse_shared,
    write_legacy,
    write_safetensors,
    write_zip,
)
from fastserial.checkpoints.verify import refuse_damaged
from fastserial.config import Config, current
from fastserial.errors import ConvertError, CorruptCheckpointError

__all__ = ["Container", "Converted", "container_of", "convert", "part_of", "write_source"]

Container = Literal["zip", "legacy", "safetensors"]
_SHOWN_KEYS = 8


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` did.

    Attributes:
        source, target: the containers of both sides.
        nbytes: size of the new file, or of the new files.
        dropped: names of the source's metadata (safetensors), for which a file of torch has no
            place; empty between two safetensors files, which keep it.
    """

    source: str
    target: str
    nbytes: int
    dropped: tuple[str, ...] = ()


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Container | None = None,
    *,
    key: str = "",
    copy_shared: bool = False,
    shard_nbytes: int | None = None,
    verify: bool = False,
    config: Config | None = None,
) -> Converted:
    """Write a checkpoint in another container; the target is replaced as a whole, or not at all.

    Locations of storages become `cpu`.

    Args:
        source: a zip, legacy or safetensors file, or the index of several safetensors files, or
            their folder.
        target: the new file; with `shard_nbytes` a new folder.
        to: its container; by default safetensors or zip, by the target's name.
        key: convert the part of it under this key, such as `model`; nested keys and places in
            lists joined by dots, as `inspect` shows them.
        copy_shared: write tensors that share memory, which safetensors cannot tell, several times.
        shard_nbytes: write several safetensors files with an index, none with more than so many
            bytes of tensors, if one tensor has not more.
        verify: check every CRC-32 of the source first (zip).
        config: options of the writer; by default those in force.

    Raises:
        ConvertError: the pickle needs more than `weights_only` allows, or something in it cannot
            be represented in the other container; names the entry.
        CorruptCheckpointError: the source is damaged, or no checkpoint.
        WriteError: the target cannot be written; what was there is intact.
        OSError: the source cannot be read.
    """
    name = os.fspath(source)
    container = container_of(os.fspath(target), to, shard_nbytes)
    if verify and not os.path.isdir(name) and not name.endswith(INDEX):
        refuse_damaged(name)
    opened = open_source(name)
    try:
        return write_source(
            opened,
            os.fspath(target),
            container,
            key=key,
            copy_shared=copy_shared,
            shard_nbytes=shard_nbytes,
            config=config or current(),
        )
    except CorruptCheckpointError as error:
        error.path = error.path or name
        raise
    finally:
        opened.close()


def container_of(target: str, to: str | None, shard_nbytes: int | None) -> str:
    """Return in which container a target is to be written.

    Raises:
        ConvertError: `shard_nbytes` is none, or the container has no shards.
    """
    if shard_nbytes is None:
        return to or ("safetensors" if target.endswith(".safetensors") else "zip")
    if to not in (None, "safetensors") or shard_nbytes <= 0:
        raise ConvertError("shard_nbytes is the most bytes of one of several safetensors files")
    return "safetensors"


def write_source(
    opened: Source,
    path: str,
    to: str,
    *,
    key: str,
    copy_shared: bool,
    shard_nbytes: int | None,
    config: Config,
) -> Converted:
    """Write what is under a key of an open source to a file, or to a folder of shards.

    Raises:
        ConvertError, CorruptCheckpointError, WriteError: as `convert`.
    """
    value = part_of(opened.value, key)
    free = opened.metadata
    if to == "safetensors":
        tensors = flat_tensors(value)
        if not copy_shared:
            refuse_shared(tensors)
        text = {"format": "pt", **free}
        if shard_nbytes is not None:
            nbytes = write_shards(tensors, opened, path, shard_nbytes, text, config)
            return Converted(opened.container, to, nbytes)
    writer = StreamWriter(path, config, opened, to)
    with writer:
        if to == "safetensors":
            write_safetensors(tensors, writer, text)
        elif to == "legacy":
            write_legacy(value, writer)
        else:
            write_zip(value, writer)
        nbytes = writer.tell()
        writer.release_sources()
        opened.check_unchanged()
    dropped = tuple(name for name in free if name != "format" and to != "safetensors")
    return Converted(opened.container, to, nbytes, dropped)


def part_of(value: Any, key: str) -> Any:
    """Return what is under a key; names in it may hold dots themselves.

    Raises:
        ConvertError: there is nothing; says how far the path resolves, and what is there.
    """
    names = key.split(".") if key else []
    found = _under(value, names)
    if found is not None:
        return found[0]
    for count in range(len(names) - 1, -1, -1):
        found = _under(value, names[:count])
        if found is not None:
            break
    way, rest = ".".join(names[:count]), ".".join(names[count:])
    inside = found[0] if found is not None else value
    raise ConvertError(f"there is no {rest!r} in {repr(way) if way else 'it'}{_offers(inside)}")


def _under(value: Any, names: list[str]) -> tuple[Any] | None:
    if not names:
        return (value,)
    for count in range(1, len(names) + 1):
        item = _child(value, ".".join(names[:count]))
        found = _under(item[0], names[count:]) if item is not None else None
        if found is not None:
            return found
    return None


def _child(value: Any, name: str) -> tuple[Any] | None:
    """Return the value of one name: a key that reads so, or a place in a list."""
    if isinstance(value, Mapping):
        if name in value:
            return (value[name],)
        return next(((item,) for key, item in value.items() if str(key) == name), None)
    if isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
        return (value[int(name)],)
    return None


def _offers(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return ""
    names = [repr(key) for key in itertools.islice(value, _SHOWN_KEYS)]
    more = ", ..." if len(value) > _SHOWN_KEYS else ""
    return f"; there are: {', '.join(names)}{more}"
