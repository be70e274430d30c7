"""Rows of `bench save`: the engine `deepspeed`, and DeepSpeed's own writer in the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastserial import engines
from fastserial.bench.measure import Sample, measure
from fastserial.bench.rows import DURABLE, Row, fast_row
from fastserial.bench.saving import Format, fast, sync

__all__ = ["deepspeed_rows"]

_BUFFER_MB = 64  # DeepSpeed's default io_buffer_size


def deepspeed_rows(
    state: object, formats: Sequence[Format], **options: Any
) -> tuple[list[Row], str | None]:
    """Return the rows, or none and what is missing here.

    DeepSpeed's writer is given our patches (it gets its storages in one call, and our checksums in
    the zip format), our repairs, and a sync of the directory: it is then durable as the others are.
    """
    missing = next(one.missing for one in engines.survey() if one.name == "deepspeed")
    if missing is not None:
        return [], missing
    rows: list[Row] = []
    for container in formats:
        row = fast_row(state, container, engine="deepspeed", **options)
        rows.append(replace(row, name=f"fastserial {container}, engine deepspeed"))
    return [*rows, *(_their_row(state, container) for container in formats)], None


def _their_row(state: object, container: Format) -> Row:
    made: list[Callable[[Path], Any]] = []  # the handle and buffer are made once

    def run(path: Path) -> Sample:
        from fastserial.integrations.deepspeed_compat import repaired

        if not made:
            made.append(_writer_factory())

        def call() -> None:
            writer = made[0](path)
            torch.save(state, writer, _use_new_zipfile_serialization=container == "zip")
            writer.close()
            sync(path)

        with fast(), repaired():
            used = measure(call)
        return Sample(path.stat().st_size, used.seconds, used.cpu_seconds, used.extra_bytes)

    # Its zip archives are all called "archive", so their bytes differ from those of a path.
    same = f"stock {container}" if container == "legacy" else None
    return Row(f"DeepSpeed's writer, {container}", DURABLE, run, f"stock {container}", same)


def _writer_factory() -> Callable[[Path], Any]:
    from deepspeed.io import FastFileWriter, FastFileWriterConfig

    from fastserial.fastpersist import get_aio_handle, get_pinned_buffer

    handle, buffer = get_aio_handle(), get_pinned_buffer(_BUFFER_MB)

    def make(path: Path) -> Any:
        config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer)
        return FastFileWriter(file_path=str(path), config=config)

    return make
