"""From and to folders of torch.distributed.checkpoint, streamed from file to file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fastserial.checkpoints.convert import Converted, ConvertSource, part_of
from fastserial.config import Config, options
from fastserial.distributed.dcp.item_layout import TensorBytes, bytes_of
from fastserial.distributed.dcp.shard_layout import ShardLayout
from fastserial.distributed.dcp.storage_writer import FastStorageWriter
from fastserial.distributed.sharding.pieces import unloadable
from fastserial.errors import ConvertError
from fastserial.patching.self_check import self_check


class _StreamingWriter(FastStorageWriter):
    """Takes the bytes of tensors from an open source."""

    def __init__(self, path: str, source: ConvertSource) -> None:
        super().__init__(path)
        self._source = source

    def _layout(self, name: str) -> ShardLayout:
        return ShardLayout(name, self._bytes_of)

    def _bytes_of(self, tensor: torch.Tensor) -> TensorBytes | None:
        found = bytes_of(tensor)
        if found is None or not found.address:
            return found
        storage = tensor.untyped_storage()
        start = found.address - storage.data_ptr()
        memory = self._source.part_of(storage, start, found.nbytes)
        return found if memory is None else found._replace(memory=memory, address=0)


def write_folder(
    source: ConvertSource, name: str, path: str, key: str, config: Config
) -> Converted:
    """Write what is under a key of an open source to a folder.

    What was in the folder stays whole until the new checkpoint is.

    Args:
        name: of the source.

    Raises:
        ConvertError: it is no dictionary, two of its entries get one key, a tensor has no bytes of
            its own, or this torch cannot be written for.
        CorruptCheckpointError: the source is damaged, or changed.
        WriteError: it cannot be written; what was there is intact.
    """
    value = part_of(source.value, key)
    if not isinstance(value, Mapping):
        raise ConvertError(f"a folder holds a dictionary, nothing of type {type(value).__name__}")
    reason = self_check()
    if reason is not None:
        raise ConvertError(f"this torch writes other archives than are known here: {reason}")
    with options(**_as_options(config)):
        writer = _StreamingWriter(path, source)
        planner = DefaultSavePlanner()
        writer.set_up_storage_writer(True, rank=0)
        try:
            planner.set_up_planner(
                cast("dict[str, Any]", value),
                storage_meta=writer.storage_meta(),
                is_coordinator=True,
            )
        except ValueError as error:  # says which key
            raise ConvertError(
                f"{name}: the keys of a folder are paths joined by dots, and two entries get the "
                f"same one ({error}): {_REMEDY}"
            ) from error
        _refuse_odd(planner.state_dict, name)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        results = writer.write_data(plan, planner).wait()
        source.check_unchanged()
        writer.finish(metadata, [results])
    nbytes = sum(
        os.stat(os.path.join(path, name)).st_size
        for name in {result.storage_data.relative_path for result in results} | {".metadata"}
    )
    dropped = tuple(name for name in source.metadata if name != "format")
    return Converted(source.container, "dcp", nbytes, dropped)


_REMEDY = "leave it out with --key (key=), or convert to one file of torch"


def _refuse_odd(flat: Mapping[str, Any], name: str) -> None:
    """Raise if a tensor cannot be loaded from a folder.

    Raises:
        ConvertError: one cannot.
    """
    for key, tensor in flat.items():
        if isinstance(tensor, torch.Tensor) and (problem := unloadable(tensor)) is not None:
            raise ConvertError(
                f"{name}: entry {key!r} cannot be loaded from a folder: {problem}; {_REMEDY}"
            )


def _as_options(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}
