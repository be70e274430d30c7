"""`fastserial.convert`: between files and the folders that many ranks save to."""

from __future__ import annotations

import os
from typing import Literal

from fastserial.checkpoints.convert import Converted, ConvertSource, container_of, write_source
from fastserial.checkpoints.mapped_source import check_source, open_source
from fastserial.config import Config, current
from fastserial.errors import CheckpointFileError, ConvertError
from fastserial.files.remote import is_url
from fastserial.formats.container import is_dcp_folder
from fastserial.interrupts import cleanup, finish_after, ours

Container = Literal["zip", "safetensors", "dcp"]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Container | None = None,
    *,
    key: str = "",
    copy_shared: bool = False,
    shard_nbytes: int | None = None,
    verify: bool = True,
    config: Config | None = None,
) -> Converted:
    """Write a checkpoint in another container; the target is replaced as a whole, or not at all.

        fastserial.convert("ckpt.pt", "model.safetensors", key="model")

    Bytes of tensors go from file to file, a block at a time. Pickles are read under the rules of
    `weights_only`. Locations of storages become `cpu`.

    Args:
        source: a zip, legacy or safetensors file; the index of several safetensors files, or their
            folder; a folder of torch.distributed.checkpoint.
        target: the new file or folder.
        to: its container; by default safetensors or zip, by the target's name. `dcp` is a folder,
            as `FastStorageWriter` writes it.
        key: convert the part of it under this key, such as `model`; nested keys and indices of
            lists joined by dots, as `inspect` shows them.
        copy_shared: write tensors that share memory several times, and expanded tensors whole;
            safetensors can represent neither.
        shard_nbytes: write the files of `save_pretrained` to a new folder, none with more than so
            many bytes of tensors, if one tensor has not more: `model.safetensors`, or several with
            an index.
        verify: check the whole source first, as `fastserial.verify` does: every CRC-32, and the
            structure. It reads the source once more.
        config: options of the writer; by default those in force.

    Raises:
        ConvertError: a pickle needs more than `weights_only` allows, something in it cannot be
            represented in the other container (names the entry), a part of the source cannot be
            checked, or a path is a URL.
        CorruptCheckpointError: the source is damaged.
        UnreadableCheckpointError: the source is no checkpoint.
        WriteError: the target cannot be written; what was there is intact.
        OSError: the source cannot be read.
    """
    name, path = os.fspath(source), os.fspath(target)
    for one in filter(is_url, (name, path)):
        raise ConvertError(f"{one}: convert takes files, not URLs: download or upload it yourself")
    is_dcp = is_dcp_folder(name)
    container = container_of(path, to, shard_nbytes)
    if verify and is_dcp:
        check_source(name, config=config)
    folders = is_dcp or container == "dcp"
    if folders and os.path.abspath(name) == os.path.abspath(path):
        raise ConvertError(f"{path}: source and target are the same")
    opened = _opened(name, is_dcp, verify)
    with cleanup(opened.close):
        try:
            settings = config or current()
            if container == "dcp":
                from fastserial.distributed.conversion import write_folder

                return write_folder(opened, name, path, key, settings)
            return write_source(
                opened,
                path,
                container,
                key=key,
                copy_shared=copy_shared,
                shard_nbytes=shard_nbytes,
                config=settings,
            )
        except ours(CheckpointFileError) as error:
            error.path = error.path or name
            raise


def _opened(name: str, is_dcp: bool, verify: bool) -> ConvertSource:
    if not is_dcp:
        return open_source(name, verify)
    from fastserial.distributed.conversion import FolderSource

    source = FolderSource(name)
    try:
        source.warn_of_text()
    except BaseException as error:  # warnings may be errors
        finish_after(error, source.close)
        raise
    return source
