"""Rows of DeepSpeed's own writer, in the same run as the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastserial import engines
from fastserial.bench.measuring.measure import Sample, measure
from fastserial.bench.measuring.rows import DURABLE, LOOSE, Row
from fastserial.bench.subjects.contents import zip_holds
from fastserial.bench.subjects.saving import Format, fast, sync

__all__ = ["their_rows"]

_BUFFER_MB = 64  # DeepSpeed's default io_buffer_size


def their_rows(
    state: object, formats: Sequence[Format], promises: Sequence[bool] = (True,)
) -> tuple[list[Row], str | None]:
    """Return a row for each format and promise (durable or not), or none and what is missing here.

    DeepSpeed's writer is given our patches (it gets its storages in one call, and our checksums in
    the zip format), our repairs, and, where it has to be durable, a sync of file and directory.
    """
    missing = next(one.missing for one in engines.survey() if one.name == "deepspeed")
    if missing is not None:
        return [], missing
    return [_row(state, one, durable) for durable in promises for one in formats], None


def _row(state: object, container: Format, durable: bool) -> Row:
    made: list[Callable[[Path], Any]] = []  # the handle and buffer are made once

    def run(path: Path) -> Sample:
        from fastserial.integrations.deepspeed_compat import repaired

        if not made:
            made.append(_writer_factory())

        def call() -> None:
            writer = made[0](path)
            torch.save(state, writer, _use_new_zipfile_serialization=container == "zip")
            writer.close()
            if durable:
                sync(path)

        with fast(), repaired():
            used = measure(call)
        return Sample(path.stat().st_size, used.seconds, used.cpu_seconds, used.extra_bytes)

    # Its zip archives are all called "archive", so their bytes differ from those of a path.
    same = f"stock {container}" if container == "legacy" else None
    check = partial(zip_holds, state) if container == "zip" else None
    group, ending = (DURABLE, "") if durable else (LOOSE, ", not durable")
    name, compared = f"DeepSpeed's writer, {container}{ending}", f"stock {container}{ending}"
    return Row(name, group, run, compared, same, check=check)


def _writer_factory() -> Callable[[Path], Any]:
    from deepspeed.io import FastFileWriter, FastFileWriterConfig

    from fastserial.integrations.fastpersist import get_aio_handle, get_pinned_buffer

    handle, buffer = get_aio_handle(), get_pinned_buffer(_BUFFER_MB)

    def make(path: Path) -> Any:
        config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer)
        return FastFileWriter(file_path=str(path), config=config)

    return make
