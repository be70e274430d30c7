"""`fastserial.convert`: between files and the folders that many ranks save to."""

from __future__ import annotations

import os
import warnings
from typing import Literal

from fastserial.checkpoints.convert import Converted, container_of, write_source
from fastserial.checkpoints.mapped_source import ConvertSource, open_source
from fastserial.checkpoints.rank_folder import RankFolder, find_rank_folder
from fastserial.checkpoints.verify import refuse_damaged
from fastserial.config import Config, current
from fastserial.errors import CheckpointFileError, ConvertError
from fastserial.formats.container import is_dcp_folder
from fastserial.patching.install import patched

__all__ = ["Container", "Converted", "convert"]

Container = Literal["zip", "legacy", "safetensors", "dcp"]
_SHOWN = 5  # names of files


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Container | None = None,
    *,
    key: str = "",
    copy_shared: bool = False,
    shard_nbytes: int | None = None,
    verify: bool = False,
    ranks: bool = False,
    config: Config | None = None,
) -> Converted:
    """Write a checkpoint in another container; the target is replaced as a whole, or not at all.

        fastserial.convert("ckpt.pt", "model.safetensors", key="model")

    Bytes of tensors go from file to file, a block at a time. Pickles are read under the rules of
    `weights_only`. Locations of storages become `cpu`.

    Args:
        source: a zip, legacy or safetensors file; the index of several safetensors files, or their
            folder; a folder of torch.distributed.checkpoint or of torch_checkpointing, whose items
            are the first level of the result.
        target: the new file or folder.
        to: its container; by default safetensors or zip, by the target's name. `dcp` is a folder,
            as `FastStorageWriter` writes it.
        key: convert the part of it under this key, such as `model`; nested keys and places in
            lists joined by dots, as `inspect` shows them.
        copy_shared: write tensors that share memory, which safetensors cannot tell, several times.
        shard_nbytes: write several safetensors files with an index to a new folder, none with more
            than so many bytes of tensors, if one tensor has not more.
        verify: check every CRC-32 of the source first (zip, folders).
        ranks: in a folder of files such as `model_0.pt` they are of ranks, although there is no
            `metadata.pkl` that says so.
        config: options of the writer; by default those in force.

    Raises:
        ConvertError: a pickle needs more than `weights_only` allows, something in it cannot be
            represented in the other container, or what ranks saved each for itself does not go
            together; names the entry.
        CorruptCheckpointError: the source is damaged.
        UnreadableCheckpointError: the source is no checkpoint.
        WriteError: the target cannot be written; what was there is intact.
        OSError: the source cannot be read.
    """
    name, path = os.fspath(source), os.fspath(target)
    is_dcp = is_dcp_folder(name)
    folder = None if is_dcp else find_rank_folder(name, by_name=ranks)
    if folder is None and (of_ranks := find_rank_folder(name, by_name=True)) is not None:
        raise ConvertError(
            f"{name}: {', '.join(of_ranks.files[:_SHOWN])}: there is no metadata.pkl that says "
            "that they are of ranks, to be put together (ranks=True, --ranks); else give one file"
        )
    from_folder = is_dcp or folder is not None
    container = container_of(path, to, shard_nbytes)
    if from_folder and container == "legacy" and patched("_legacy_save") is None:
        raise ConvertError("this torch has no patch: from a folder to a legacy file goes by a zip")
    if verify and folder is not None:
        for file in (*folder.files, *([folder.metadata] if folder.metadata else [])):
            refuse_damaged(os.path.join(name, file), config=config)
    elif verify and is_dcp:
        refuse_damaged(name, config=config)
    folders = from_folder or container == "dcp"
    if folders and os.path.abspath(name) == os.path.abspath(path):
        raise ConvertError(f"{path}: source and target are the same")
    if folder is not None and os.path.realpath(name) == os.path.dirname(os.path.realpath(path)):
        raise ConvertError(f"{path}: the target is among the files of the source")
    opened = _opened(name, from_folder, folder, key, verify)
    if folder is not None:
        key = ""
    try:
        settings = config or current()
        if container == "dcp":
            from fastserial.distributed.conversion.dcp_writer import write_folder

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
    except CheckpointFileError as error:
        error.path = error.path or name
        raise
    finally:
        opened.close()


def _opened(
    name: str, from_folder: bool, ranks: RankFolder | None, key: str, verify: bool
) -> ConvertSource:
    if not from_folder:
        return open_source(name, verify)
    if ranks is not None:
        from fastserial.distributed.conversion.rank_source import RankSource

        if ranks.others and not key:
            files = ", ".join(ranks.others[:_SHOWN])
            more = len(ranks.others) - _SHOWN
            text = f"{name}: not converted, as no files of torch.save: {files}"
            warnings.warn(text + (f" and {more} more" if more > 0 else ""), stacklevel=3)
        return RankSource(name, ranks, key)
    from fastserial.distributed.conversion.folder_source import FolderSource

    return FolderSource(name)
