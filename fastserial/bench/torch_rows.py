"""Rows of `torch.save`: as it came, with fastserial, and with each of its engines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import fastserial
from fastserial import config, engines
from fastserial.bench.compare import different_tensors, tensors_of
from fastserial.bench.measure import BenchError, Sample, measure
from fastserial.bench.rotation import DURABLE, LOOSE, OVERHEAD, OVERWRITE, Row
from fastserial.bench.state import small_pages as on_small_pages
from fastserial.engines.null import NullEngine

__all__ = [
    "Format",
    "engine_rows",
    "fast",
    "fast_row",
    "stock",
    "stock_row",
    "sync",
    "torch_rows",
    "write",
    "zip_holds",
]

Format = Literal["zip", "legacy"]
_ENDINGS = {
    DURABLE: "",
    OVERWRITE: ", overwriting",
    LOOSE: ", not durable",
    OVERHEAD: ", null engine",
}


@contextlib.contextmanager
def stock(crc: bool = True) -> Iterator[None]:
    """torch without fastserial, whether it was installed before or not; `crc`: with checksums."""
    before, crc_before = fastserial.installed(), torch.serialization.get_crc32_options()
    fastserial.uninstall()
    torch.serialization.set_crc32_options(crc)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(crc_before)
        if before:
            fastserial.install()


@contextlib.contextmanager
def fast(**options: Any) -> Iterator[None]:
    """torch with fastserial, and options for it.

    Raises:
        PatchError: the installed torch cannot be patched.
    """
    before = fastserial.installed()
    fastserial.install(strict=True)
    try:
        with fastserial.options(**options):
            yield
    finally:
        if not before:
            fastserial.uninstall()


def write(state: object, path: Path, container: Format) -> None:
    """`torch.save` to a path."""
    torch.save(state, path, _use_new_zipfile_serialization=container == "zip")


def sync(path: Path) -> None:
    """Put a file and its directory entry on the device, as careful users of stock torch do."""
    for name, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        fd = os.open(name, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def zip_holds(state: object, path: Path) -> bool:
    """Return whether a zip checkpoint holds the tensors of `state`, as stock torch reads it."""
    with stock():  # by a memory map, which takes no memory
        found = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    return not different_tensors(tensors_of(state), tensors_of(found))


def stock_row(
    state: object,
    container: Format,
    *,
    durable: bool = True,
    overwrites: bool = False,
    crc: bool = True,
) -> Row:
    """Return a row of torch as it came. Timed: the call; if durable, file and folder's fsync."""

    def run(path: Path) -> Sample:
        def call() -> None:
            write(state, path, container)
            if durable:
                sync(path)

        with stock(crc):
            used = measure(call)
        return replace(used, nbytes=path.stat().st_size)

    group = _group(durable, overwrites)
    plain = f"stock {container}{_ENDINGS[group]}"
    name = plain if crc else f"{plain}, CRC off"
    check = partial(zip_holds, state) if container == "zip" else None
    return Row(name, group, run, None if crc else plain, None, overwrites, check)


def fast_row(
    state: object,
    container: Format,
    *,
    durable: bool = True,
    overwrites: bool = False,
    huge_pages: bool = True,
    **options: Any,
) -> Row:
    """Return a row of torch with fastserial installed, and options for it. Timed: the call.

    Without `huge_pages` its buffers are on ordinary pages, as fio's are by default.
    """
    null = options.get("engine") is NullEngine

    def run(path: Path) -> Sample:
        pages = nullcontext() if huge_pages else on_small_pages()
        with fast(durable=durable, **options), pages:
            used = measure(lambda: write(state, path, container))
            report = fastserial.last_save_report()
        if report is None or report.path != str(path):
            raise BenchError(f"stock torch wrote {path}, not fastserial")
        latency = None if null else report.complete
        return replace(used, nbytes=report.bytes, latency=latency, fallback=report.fallback)

    compared = _group(durable, overwrites)
    group = OVERHEAD if null else compared
    return Row(
        f"fastserial {container}{_ENDINGS[group]}{'' if huge_pages else ', small pages'}",
        group,
        run,
        f"stock {container}{_ENDINGS[compared]}",
        None if null else f"stock {container}",
        overwrites,
    )


def torch_rows(
    state: object,
    formats: Sequence[Format],
    *,
    overwriting: bool = False,
    loose: bool = True,
    small_pages: bool = False,
) -> list[Row]:
    """Return the rows of torch, stock ones first: what others must equal comes first.

    Args:
        overwriting: add rows that save over an existing file.
        loose: add rows that are not durable, and those of the engine that writes nothing.
        small_pages: add rows on ordinary pages, to compare with fio on ordinary pages.
    """
    rows = [stock_row(state, container) for container in formats]
    if "zip" in formats:
        rows.append(stock_row(state, "zip", crc=False))
    rows += [fast_row(state, container) for container in formats]
    for container in formats if small_pages else ():
        rows.append(fast_row(state, container, huge_pages=False))
    for container in formats if overwriting else ():
        rows.append(stock_row(state, container, overwrites=True))
        rows.append(fast_row(state, container, overwrites=True))
    for container in formats if loose else ():
        rows.append(stock_row(state, container, durable=False))
        rows.append(fast_row(state, container, durable=False))
        rows.append(fast_row(state, container, durable=False, engine=NullEngine, preallocate=False))
    return rows


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


def _group(durable: bool, overwrites: bool) -> str:
    if not durable:
        return LOOSE
    return OVERWRITE if overwrites else DURABLE
