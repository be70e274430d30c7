"""Writing the files of `fastserial.convert`, streamed from the source.

Pickles are read under torch's `weights_only` rules. Storages are never loaded: the writer reads
their bytes from the source while it fills its staging buffers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastserial.checkpoints.streaming import (
    ConvertSource,
    flat_tensors,
    refuse_shared,
    write_safetensors,
    write_zip,
)
from fastserial.config import Config
from fastserial.errors import ConvertError
from fastserial.files.durable import replace_bytes, sync_folders
from fastserial.formats.safetensors import INDEX, shard_name
from fastserial.saving.writer import FastFileWriter

_SHOWN_KEYS = 8


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` did.

    Attributes:
        source, target: the containers of both sides.
        nbytes: size of the new file, or of the new files.
        dropped: names of the source's metadata (safetensors) that a file of torch cannot hold;
            empty between two safetensors files, which keep it.
    """

    source: str
    target: str
    nbytes: int
    dropped: tuple[str, ...] = ()


def container_of(target: str, to: str | None, shard_nbytes: int | None) -> str:
    """Return the container in which a target is written.

    Raises:
        ConvertError: it cannot be written; or `shard_nbytes` is none, or it has no shards.
    """
    if to not in (None, "zip", "safetensors", "dcp"):
        raise ConvertError(
            f"convert does not write {to!r}, but zip, safetensors and dcp; for the legacy format: "
            "torch.save(torch.load(...), target, _use_new_zipfile_serialization=False)"
        )
    if shard_nbytes is None:
        return to or ("safetensors" if target.endswith(".safetensors") else "zip")
    if to not in (None, "safetensors") or shard_nbytes <= 0:
        raise ConvertError("shard_nbytes is the most bytes of one of several safetensors files")
    return "safetensors"


def write_source(
    opened: ConvertSource,
    path: str,
    to: str,
    *,
    key: str,
    copy_shared: bool,
    shard_nbytes: int | None,
    config: Config,
) -> Converted:
    """Write the value under a key of an open source to a file, or to a folder of shards.

    Raises:
        ConvertError, CorruptCheckpointError, WriteError: as `convert`.
    """
    value = part_of(opened.value, key)
    free = opened.metadata
    if to == "zip":
        with _writing(path, opened, to, config) as writer:
            write_zip(value, writer, opened)
        dropped = tuple(name for name in free if name != "format")
        return Converted(opened.container, to, writer.tell(), dropped)
    tensors = flat_tensors(value)
    if not copy_shared:
        refuse_shared(tensors)
    text = {"format": "pt", **free}
    if shard_nbytes is None:
        nbytes = _write_safetensors(tensors, opened, path, text, config)
    else:
        nbytes = _write_shards(tensors, opened, path, shard_nbytes, text, config)
    return Converted(opened.container, to, nbytes)


@contextlib.contextmanager
def _writing(path: str, source: ConvertSource, to: str, config: Config) -> Iterator[FastFileWriter]:
    """Open a writer; the file is completed if the source is what it was when it was opened."""
    with FastFileWriter(path, config, container=to) as writer:
        yield writer
        writer.release_sources()
        source.check_unchanged()


def _write_safetensors(
    tensors: Mapping[str, torch.Tensor],
    source: ConvertSource,
    path: str,
    metadata: Mapping[str, str],
    config: Config,
) -> int:
    with _writing(path, source, "safetensors", config) as writer:
        write_safetensors(tensors, writer, source, metadata)
    return writer.tell()


def part_of(value: Any, key: str) -> Any:
    """Return the value under a key; names in it may contain dots.

    Raises:
        ConvertError: there is none; says how far the path resolves, and which names exist there.
    """
    names = key.split(".") if key else []
    found = _under(value, names)
    if found is not None:
        return found[0]
    for count in range(len(names) - 1, -1, -1):
        found = _under(value, names[:count])
        if found is not None:
            break
    resolved, rest = ".".join(names[:count]), ".".join(names[count:])
    inside = found[0] if found is not None else value
    where = repr(resolved) if resolved else "it"
    raise ConvertError(f"there is no {rest!r} in {where}{_offers(inside)}")


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
    """Return the value of one name: a key with this text, or an index of a list."""
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


def _write_shards(
    tensors: Mapping[str, torch.Tensor],
    source: ConvertSource,
    folder: str,
    nbytes: int,
    metadata: Mapping[str, str],
    config: Config,
) -> int:
    """Write tensors to files of a new folder, and last the index, which completes it.

    Args:
        source: the source of their bytes.
        nbytes: most bytes of tensors in a file, unless one tensor has more.
        metadata: free text, for each file.

    Returns:
        The bytes of all files.

    Raises:
        ConvertError: the folder is not empty.
        WriteError: it cannot be written.
    """
    shards = _shards(tensors, nbytes)
    _make(folder, config.durable)
    total = 0
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = shard_name(number, len(shards))
        path = os.path.join(folder, name)
        total += _write_safetensors(shard, source, path, metadata, config)
        files.update(dict.fromkeys(shard, name))
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    text = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
    replace_bytes(os.path.join(folder, INDEX), text, config.durable)
    return total + len(text)


def _shards(tensors: Mapping[str, torch.Tensor], nbytes: int) -> list[dict[str, torch.Tensor]]:
    """Return the tensors in their order, in groups of `nbytes` bytes at most."""
    found: list[dict[str, torch.Tensor]] = [{}]
    free = nbytes
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize
        if found[-1] and size > free:
            found.append({})
            free = nbytes
        found[-1][key] = tensor
        free -= size
    return found


def _make(folder: str, durable: bool) -> None:
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise ConvertError(f"{folder}: it is not empty: give a new folder")
    if durable:
        sync_folders([os.path.abspath(folder)])
