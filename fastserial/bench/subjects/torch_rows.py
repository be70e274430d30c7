"""What a benchmark compares: rows, each one way to write one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fastserial
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.measure import Sample, measure
from fastserial.bench.measuring.pages import small_pages
from fastserial.bench.measuring.rows import DURABLE, LOOSE, OVERHEAD, OVERWRITE, Row
from fastserial.bench.subjects.contents import zip_holds
from fastserial.bench.subjects.saving import Format, fast, stock, sync, write
from fastserial.engines.null import NullEngine

__all__ = ["fast_row", "stock_row", "torch_rows"]


def stock_row(
    state: object,
    container: Format,
    *,
    durable: bool = True,
    overwrites: bool = False,
    crc: bool = True,
) -> Row:
    """Return a row of torch as it came; durable means an fsync of file and directory.

    Zip files are read back through a memory map, which takes no memory; legacy ones have no map.
    """

    def run(path: Path) -> Sample:
        def call() -> None:
            write(state, path, container)
            if durable:
                sync(path)

        with stock(crc):
            used = measure(call)
        return used.sample(path.stat().st_size)

    group = _group(durable, overwrites)
    name = _name("stock", container, group) + ("" if crc else ", CRC off")
    plain = _name("stock", container, group)
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
    """Return a row of torch with fastserial installed, and options for it.

    Without `huge_pages` its buffers are on ordinary pages, as fio's are by default.
    """

    null = options.get("engine") is NullEngine

    def run(path: Path) -> Sample:
        pages = nullcontext() if huge_pages else small_pages()
        with fast(durable=durable, **options), pages:
            used = measure(lambda: write(state, path, container))
            report = fastserial.last_save_report()
        if report is None or report.path != str(path):
            raise BenchError(f"torch wrote {path} its own way, not fastserial")
        return used.sample(report.bytes, None if null else report.complete, report.fallback)

    group = OVERHEAD if null else _group(durable, overwrites)
    compared = _group(durable, overwrites)
    return Row(
        _name("fastserial", container, group) + ("" if huge_pages else ", small pages"),
        group,
        run,
        _name("stock", container, compared),
        None if null else _name("stock", container, DURABLE),
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
        loose: add rows that are not durable.
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


def _group(durable: bool, overwrites: bool) -> str:
    if not durable:
        return LOOSE
    return OVERWRITE if overwrites else DURABLE


def _name(who: str, container: str, group: str) -> str:
    endings = {
        DURABLE: "",
        OVERWRITE: ", overwriting",
        LOOSE: ", not durable",
        OVERHEAD: ", null engine",
    }
    return f"{who} {container}{endings[group]}"
