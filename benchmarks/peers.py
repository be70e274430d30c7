"""Rows of what else writes checkpoints: safetensors, DCP, DeepSpeed's writer, torch without CRC.

safetensors and DCP hold no shared storages and no objects: they are given the tensors, each storage
once, by dotted names. What they wrote is read back with their own reader.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastserial import engines
from fastserial.bench.measure import Sample, measure
from fastserial.bench.payload import fingerprints, tensors_of
from fastserial.bench.rotation import DURABLE, LOOSE, Row
from fastserial.bench.torch_rows import Format, fast, stock, sync

__all__ = [
    "dcp_read",
    "dcp_write",
    "different_tensors",
    "peer_rows",
    "safetensors_row",
    "stock_with",
    "their_op",
    "unshared",
]

Tensors = Mapping[str, torch.Tensor]


def different_tensors(one: Tensors, other: Tensors) -> list[str]:
    """Return the names of tensors that are missing on one side or differ in type or bits."""
    mine, theirs = fingerprints(one), fingerprints(other)
    names = dict.fromkeys([*mine, *theirs])
    return [name for name in names if mine.get(name) != theirs.get(name)]


def unshared(state: object) -> dict[str, torch.Tensor]:
    """Return the tensors, each storage once: what formats without shared storages can hold."""
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors_of(state).items():
        kept.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
    return dict(kept.values())


def _zip_holds(state: object, path: Path) -> bool:
    """Return whether a zip checkpoint holds the tensors of `state`, as stock torch reads it."""
    with stock():  # by a memory map, which takes no memory
        found = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    return not different_tensors(tensors_of(state), tensors_of(found))


def peer_rows(
    state: object, formats: Sequence[Format], *, loose: bool = True, io_buffer_mb: int = 64
) -> tuple[list[Row], dict[str, str]]:
    """Return rows of other packages, and for those that are not there the command to get them.

    Args:
        state: what they save.
        formats: torch's containers, of DeepSpeed's writer.
        loose: add rows that are not durable.
        io_buffer_mb: MiB of the buffer of DeepSpeed's writer.
    """
    promises = (True, False) if loose else (True,)
    rows: list[Row] = []
    missing: dict[str, str] = {}
    lacks = next((one.missing for one in engines.survey() if one.name == "deepspeed"), "unknown")
    if lacks is None:
        rows = [
            _deepspeed_row(state, one, two, io_buffer_mb) for two in promises for one in formats
        ]
    else:
        missing["DeepSpeed's writer"] = lacks
    if "zip" in formats:
        rows += [_unchecked_row(state, durable) for durable in promises]
    tensors, compared = unshared(state), f"stock {formats[0]}"
    if importlib.util.find_spec("safetensors") is None:
        missing["safetensors"] = "not installed: pip install safetensors"
    else:
        rows += [safetensors_row(tensors, durable, compared) for durable in promises]
    rows += [_dcp_row(tensors, durable, compared) for durable in promises]
    return rows, missing


def _unchecked_row(state: object, durable: bool) -> Row:
    """Return a row of stock `torch.save` without CRC-32: its file says 0 instead."""

    def save(path: Path) -> None:
        torch.save(state, path)

    check, context = partial(_zip_holds, state), partial(stock_with, crc=False)
    return _row("stock zip, CRC off", save, check, durable, "stock zip", context)


@contextlib.contextmanager
def stock_with(crc: bool) -> Iterator[None]:
    """Run stock torch, with checksums or without."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc)
    try:
        with stock():
            yield
    finally:
        torch.serialization.set_crc32_options(before)


def safetensors_row(tensors: Tensors, durable: bool = True, compared: str = "stock zip") -> Row:
    """Return a row of safetensors' `save_file`; durable as the others: file and directory synced.

    Args:
        tensors: what it saves.
        durable: the sync is timed, too.
        compared: the row of stock torch that it is compared with.
    """

    def save(path: Path) -> None:
        importlib.import_module("safetensors.torch").save_file(dict(tensors), path)

    def holds(path: Path) -> bool:
        found = importlib.import_module("safetensors.torch").load_file(path)
        return not different_tensors(tensors, found)

    return _row("safetensors", save, holds, durable, compared)


def _dcp_row(tensors: Tensors, durable: bool, compared: str) -> Row:
    """Return a row of torch.distributed.checkpoint in a world of one process.

    Durable: its `sync_files`, which is its default, and the directories that it does not sync.
    """

    def holds(path: Path) -> bool:
        with _dcp() as dcp:
            names = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        found = {name: torch.zeros_like(one, device="cpu") for name, one in tensors.items()}
        dcp_read(found, path)
        return names == set(tensors) and not different_tensors(tensors, found)

    save = partial(dcp_write, tensors, sync_files=durable)
    return _row("DCP FileSystemWriter", save, holds, durable, compared)


def dcp_write(tensors: Tensors, path: Path, sync_files: bool = True) -> None:
    """Save tensors to a new directory with `FileSystemWriter`."""
    with _dcp() as dcp:
        writer = dcp.FileSystemWriter(path, sync_files=sync_files)
        dcp.save(dict(tensors), storage_writer=writer)


def dcp_read(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Load the tensors of these names, into these tensors."""
    with _dcp() as dcp:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))


@contextlib.contextmanager
def _dcp() -> Iterator[Any]:
    """torch.distributed.checkpoint, without its warnings about a world of one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("torch.distributed.checkpoint")


def _deepspeed_row(state: object, container: Format, durable: bool, io_buffer_mb: int) -> Row:
    """Return a row of `deepspeed.io.FastFileWriter`, given to `torch.save`.

    It is given our patches (it gets its storages in one call in the legacy format), the op that CPU
    lacks, and, where it has to be durable, a sync of file and directory.
    """
    make = functools.cache(partial(_writer_factory, io_buffer_mb))  # handle and buffer: once

    def save(path: Path) -> None:
        writer = make()(path)
        torch.save(state, writer, _use_new_zipfile_serialization=container == "zip")
        writer.close()

    @contextlib.contextmanager
    def prepared() -> Iterator[None]:
        make()
        with fast(), their_op():
            yield

    compared = f"stock {container}"
    check = partial(_zip_holds, state) if container == "zip" else None
    row = _row(f"DeepSpeed's writer, {container}", save, check, durable, compared, prepared)
    # Its zip archives are all called "archive", so their bytes differ from those of a path.
    return replace(row, same_bytes_as=compared if container == "legacy" else None)


@contextlib.contextmanager
def their_op() -> Iterator[None]:
    """Give DeepSpeed's own writer the op that it needs and CPU lacks, in a `with` block."""
    upstream: Any = importlib.import_module("deepspeed.io.fast_file_writer")
    before = upstream.UtilsBuilder
    upstream.UtilsBuilder = _ByteViews
    try:
        yield
    finally:
        upstream.UtilsBuilder = before


class _ByteViews:
    """Stands for the op `UtilsBuilder`."""

    def load(self) -> _ByteViews:
        return self

    @staticmethod
    def cast_to_byte_tensor(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the tensors as bytes; a view keeps its tensor's memory."""
        return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]


def _writer_factory(io_buffer_mb: int) -> Callable[[Path], Any]:
    from deepspeed.io import FastFileWriter, FastFileWriterConfig

    from fastserial.integrations.fastpersist import get_aio_handle

    handle = get_aio_handle()
    buffer = handle.new_cpu_locked_tensor(io_buffer_mb << 20, torch.empty(0, dtype=torch.uint8))

    def make(path: Path) -> Any:
        config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer)
        return FastFileWriter(file_path=str(path), config=config)

    return make


def _row(
    name: str,
    save: Callable[[Path], None],
    check: Callable[[Path], bool] | None,
    durable: bool,
    compared: str,
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Row:
    def run(path: Path) -> Sample:
        def call() -> None:
            save(path)
            if durable:
                sync(path)

        with context():
            used = measure(call)
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        return replace(used, nbytes=sum(one.stat().st_size for one in files))

    ending = "" if durable else ", not durable"
    group = DURABLE if durable else LOOSE
    return Row(f"{name}{ending}", group, run, f"{compared}{ending}", check=check)
