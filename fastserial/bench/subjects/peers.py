"""Rows of other packages that write checkpoints, and of every engine of fastserial.

Peers hold no shared storages and no objects: they are given the tensors, each storage once, by
dotted names, and what they wrote is read back with their own reader.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastserial import config, engines
from fastserial.bench.measuring.identical import different_tensors
from fastserial.bench.measuring.measure import Sample, measure
from fastserial.bench.measuring.rows import DURABLE, LOOSE, Row
from fastserial.bench.subjects import dcp
from fastserial.bench.subjects.contents import unshared, zip_holds
from fastserial.bench.subjects.saving import Format, fast, sync
from fastserial.bench.subjects.torch_rows import fast_row

__all__ = ["engine_rows", "peer_rows", "safetensors_row", "their_rows"]

Tensors = Mapping[str, torch.Tensor]
_BATCH_BYTES = 256 << 20  # read back at once
_BUFFER_MB = 64  # DeepSpeed's default io_buffer_size


def engine_rows(state: object, formats: Sequence[Format]) -> tuple[list[Row], dict[str, str]]:
    """Return durable rows of the engines that are not in use, and why others cannot run here."""
    rows: list[Row] = []
    missing: dict[str, str] = {}
    for engine in engines.survey():
        if engine.name == config.current().engine:
            continue
        if engine.missing is not None:
            missing[f"engine {engine.name}"] = engine.missing
            continue
        for container in formats:
            row = fast_row(state, container, engine=engine.name)
            rows.append(replace(row, name=f"{row.name}, engine {engine.name}"))
    return rows, missing


def peer_rows(
    state: object, formats: Sequence[Format], loose: bool = True
) -> tuple[list[Row], dict[str, str]]:
    """Return rows of other packages, and for those that are not there the command to get them.

    Args:
        loose: add rows that are not durable.
    """
    rows, problem = their_rows(state, formats, (True, False) if loose else (True,))
    missing = {} if problem is None else {"DeepSpeed's writer": problem}
    tensors = unshared(state)
    compared = f"stock {formats[0]}"
    promises = (True, False) if loose else (True,)
    for name, module, command, make in _PEERS:
        if importlib.util.find_spec(module) is None:
            missing[name] = f"not installed: {command}"
        else:
            rows += [make(tensors, durable, compared) for durable in promises]
    return rows, missing


def their_rows(
    state: object, formats: Sequence[Format], promises: Sequence[bool] = (True,)
) -> tuple[list[Row], str | None]:
    """Return a row for each format and promise (durable or not), or none and what is missing here.

    DeepSpeed's writer is given our patches (it gets its storages in one call in the legacy format),
    our repairs, and, where it has to be durable, a sync of file and directory.
    """
    missing = next(one.missing for one in engines.survey() if one.name == "deepspeed")
    if missing is not None:
        return [], missing
    return [_deepspeed_row(state, one, durable) for durable in promises for one in formats], None


def _deepspeed_row(state: object, container: Format, durable: bool) -> Row:
    make = functools.cache(_writer_factory)  # the handle and buffer are made once

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
    check = partial(zip_holds, state) if container == "zip" else None
    row = _row(f"DeepSpeed's writer, {container}", save, check, durable, compared, prepared)
    # Its zip archives are all called "archive", so their bytes differ from those of a path.
    return replace(row, same_bytes_as=compared if container == "legacy" else None)


@contextlib.contextmanager
def their_op() -> Iterator[None]:
    """Give DeepSpeed's own writer the op that it needs and CPU lacks, in a `with` block."""
    import deepspeed.io.fast_file_writer as upstream

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


def _writer_factory() -> Callable[[Path], Any]:
    from deepspeed.io import FastFileWriter, FastFileWriterConfig

    from fastserial.integrations.fastpersist import get_aio_handle, get_pinned_buffer

    handle, buffer = get_aio_handle(), get_pinned_buffer(_BUFFER_MB)

    def make(path: Path) -> Any:
        config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer)
        return FastFileWriter(file_path=str(path), config=config)

    return make


def safetensors_row(tensors: Tensors, durable: bool = True, compared: str = "stock zip") -> Row:
    """Return a row of safetensors' `save_file`; durable as the others: file and directory synced.

    Args:
        compared: the row of stock torch that it is compared with.
    """

    def save(path: Path) -> None:
        from safetensors.torch import save_file

        save_file(dict(tensors), path)

    return _row("safetensors", save, partial(_safetensors_holds, tensors), durable, compared)


def _dcp_row(tensors: Tensors, durable: bool, compared: str) -> Row:
    """Return a row of torch.distributed.checkpoint in a world of one process.

    Durable: its `sync_files`, which is its default, and the directories that it does not sync.
    """

    def save(path: Path) -> None:
        dcp.write(tensors, path, sync_files=durable)

    return _row("DCP FileSystemWriter", save, partial(_dcp_holds, tensors), durable, compared)


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
        return used.sample(_bytes_of(path))

    ending = "" if durable else ", not durable"
    return Row(
        f"{name}{ending}",
        DURABLE if durable else LOOSE,
        run,
        f"{compared}{ending}",
        check=check,
    )


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


# -- reading back --------------------------------------------------------------------------------


def _safetensors_holds(tensors: Tensors, path: Path) -> bool:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(tensors):
            return False
        return not any(
            different_tensors({name: tensor}, {name: file.get_tensor(name)})
            for name, tensor in tensors.items()
        )


def _dcp_holds(tensors: Tensors, path: Path) -> bool:
    if dcp.names_in(path) != set(tensors):
        return False
    for batch in _batches(tensors):
        found = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in batch.items()}
        dcp.read(found, path)
        if different_tensors(batch, found):
            return False
    return True


def _batches(tensors: Tensors) -> list[dict[str, torch.Tensor]]:
    """Return the tensors in groups, so that not all must be in memory twice."""
    batches: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled > _BATCH_BYTES:
            batches.append({})
            filled = 0
        batches[-1][name] = tensor
        filled += tensor.nbytes
    return batches


_PEERS: list[tuple[str, str, str, Callable[[Tensors, bool, str], Row]]] = [
    ("safetensors", "safetensors", "pip install safetensors", safetensors_row),
    (
        "DCP FileSystemWriter",
        "torch.distributed.checkpoint",
        "pip install a torch with torch.distributed",
        _dcp_row,
    ),
]
