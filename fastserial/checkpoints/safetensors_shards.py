"""Several safetensors files with an index, as Hugging Face names them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch

from fastserial.checkpoints.mapped_source import INDEX, Source
from fastserial.checkpoints.streaming import StreamWriter, write_safetensors
from fastserial.config import Config
from fastserial.errors import ConvertError
from fastserial.files.durable import replace_bytes, sync_folders

__all__ = ["write_shards"]

_STEM = "model"


def write_shards(
    tensors: Mapping[str, torch.Tensor],
    source: Source,
    folder: str,
    nbytes: int,
    metadata: Mapping[str, str],
    config: Config,
) -> int:
    """Write tensors to files of a new folder, and last the index, which makes it complete.

    Args:
        source: knows their bytes.
        nbytes: no file has more bytes of tensors, if one tensor has not more.
        metadata: free text, for each file.

    Returns:
        The bytes of all files.

    Raises:
        ConvertError: there is something in the folder.
        WriteError: it cannot be written.
    """
    shards = _shards(tensors, nbytes)
    _make(folder, config.durable)
    total = 0
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{_STEM}-{number:05}-of-{len(shards):05}.safetensors"
        path = os.path.join(folder, name)
        writer = StreamWriter(path, config, source, "safetensors")
        with writer:
            write_safetensors(shard, writer, metadata)
            total += writer.tell()
            writer.release_sources()
            source.check_unchanged()
        files.update(dict.fromkeys(shard, name))
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    text = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
    replace_bytes(os.path.join(folder, _STEM + INDEX), text, config.durable)
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
