"""Rows of `torch.save`: stock, with fastserial, and with each of its engines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

import fastserial
from fastserial import config, engines
from fastserial.bench.measure import BenchError, Sample, measure
from fastserial.bench.rotation import DURABLE, LOOSE, Row

Format = Literal["zip", "legacy"]


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """Run torch without fastserial, whether it was installed before or not."""
    before = fastserial.installed()
    fastserial.uninstall()
    try:
        yield
    finally:
        if before:
            fastserial.install()


@contextlib.contextmanager
def fast(**options: Any) -> Iterator[None]:
    """Run torch with fastserial, and options for it.

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
    """Save with `torch.save` to a path."""
    torch.save(state, path, _use_new_zipfile_serialization=container == "zip")


def sync(path: Path) -> None:
    """Put a file and its directory entry on the device, as careful users of stock torch do."""
    for name, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        fd = os.open(name, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def stock_row(state: object, container: Format, group: str = DURABLE) -> Row:
    """Return a row of stock torch. Timed: the call; if durable, the fsync of file and folder."""

    def run(path: Path) -> Sample:
        def call() -> None:
            write(state, path, container)
            if group != LOOSE:
                sync(path)

        with stock():
            used = measure(call)
        return replace(used, nbytes=path.stat().st_size)

    return Row(_name("stock", container, group), group, run)


def fast_row(
    state: object, container: Format, group: str = DURABLE, engine: str | None = None
) -> Row:
    """Return a row of torch with fastserial installed. Timed: the call."""
    options = {} if engine is None else {"engine": engine}

    def run(path: Path) -> Sample:
        with fast(durable=group != LOOSE, **options):
            used = measure(lambda: write(state, path, container))
            report = fastserial.last_save_report()
        if report is None or report.path != str(path):
            raise BenchError(f"stock torch wrote {path}, not fastserial")
        return replace(used, nbytes=report.bytes, fallback=report.fallback)

    name = _name("fastserial", container, group) + (f", engine {engine}" if engine else "")
    return Row(name, group, run, _name("stock", container, group), f"stock {container}")


def torch_rows(state: object, formats: Sequence[Format], groups: Sequence[str]) -> list[Row]:
    """Return the rows of torch; those of stock precede what is compared with them."""
    return [
        make(state, container, group)
        for group in groups
        for make in (stock_row, fast_row)
        for container in formats
    ]


def engine_rows(state: object, formats: Sequence[Format]) -> tuple[list[Row], dict[str, str]]:
    """Return durable rows of the engines that are not in use, and why others cannot run here."""
    rows: list[Row] = []
    missing: dict[str, str] = {}
    for engine in engines.survey():
        if engine.name == config.current().engine:
            continue
        absent = engine.missing
        if absent is None and engine.name == "deepspeed":
            absent = _lock_of_op()
        if absent is not None:
            missing[f"engine {engine.name}"] = absent
        else:
            rows += [fast_row(state, container, engine=engine.name) for container in formats]
    return rows, missing


def _lock_of_op() -> str | None:
    """Return why DeepSpeed's op cannot be loaded now: torch's loader would wait for a lock."""
    from torch.utils import cpp_extension

    directory: Any = cpp_extension._get_build_directory
    lock = os.path.join(directory("async_io", False), "lock")
    if not os.path.exists(lock):
        return None
    return f"its op is being built; if no build runs, one was killed: rm {lock}"


def _name(writer: str, container: Format, group: str) -> str:
    return f"{writer} {container}{group.removeprefix(DURABLE) if group != LOOSE else f', {LOOSE}'}"
