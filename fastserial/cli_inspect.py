"""`fastserial verify` and `fastserial inspect`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fastserial import config as config_module
from fastserial.console import new_console
from fastserial.report import format_bandwidth, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from fastserial.inspection import Inspection
    from fastserial.verification import VerifyReport

__all__ = ["inspect", "verify"]

_OK, _DAMAGED, _CANNOT_TELL = 0, 1, 2
_SHOWN_TENSORS = 3


def verify(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR...", help="Checkpoints, or folders of them.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only what is wrong.")] = False,
) -> None:
    """Check every checksum and the structure of checkpoints. Executes nothing in them.

    Exit status: 0 all are whole, 1 one is damaged, 2 one cannot be checked, or is no checkpoint.
    """
    from fastserial.verification import verify as check

    config = config_module.current(**({"threads": threads} if threads else {}))
    reports: list[VerifyReport] = []
    console = new_console()
    nothing: list[str] = []
    for path in paths:
        found = False
        for name in _files(path):
            found = True
            report = check(name, config)
            reports.append(report)
            if not as_json and not (quiet and report.ok):
                _print_report(console, report)
        if not found:
            nothing.append(str(path))
    states = {report.status for report in reports}
    status = _DAMAGED if "damaged" in states else _OK
    if status == _OK and ("unreadable" in states or nothing):
        status = _CANNOT_TELL
    if as_json:
        result = {
            "status": status,
            "files": [report.to_dict() for report in reports],
            "no_checkpoints_in": nothing,
        }
        typer.echo(json.dumps(result, indent=2))
    else:
        for name in nothing:
            typer.echo(f"no checkpoints in {name}", err=True)
        if not quiet and len(reports) > 1:
            _print_sum(console, reports)
    raise typer.Exit(status)


def _files(path: Path) -> Iterator[str]:
    from fastserial.verification import checkpoints_in

    if path.is_dir():
        yield from checkpoints_in(path)
    else:
        yield str(path)


_COLORS = {"ok": "green", "damaged": "red", "unreadable": "yellow"}


def _print_report(console: Console, report: VerifyReport) -> None:
    color = _COLORS[report.status]
    speed = format_bandwidth(report.bytes / report.seconds) if report.seconds else ""
    console.print(
        f"[{color}]{report.status:10}[/] {escape(report.path)}  {report.format or '-'}, "
        f"{report.records} records, {format_bytes(report.bytes)}, {speed}",
        soft_wrap=True,
    )
    for note in report.notes:
        console.print(f"           {escape(note)}", soft_wrap=True)
    if report.problems:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("kind", "record", "byte", "tensors", "what is wrong"):
            table.add_column(column, overflow="fold")
        for problem in report.problems:
            table.add_row(
                problem.kind,
                escape(problem.record or "-"),
                "-" if problem.offset is None else str(problem.offset),
                escape(_some(problem.tensors)),
                escape(problem.message),
            )
        console.print(table)
        if report.found > len(report.problems):
            console.print(f"... and {report.found - len(report.problems)} more")


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(name or "(root)" for name in names[:_SHOWN_TENSORS])
    rest = len(names) - _SHOWN_TENSORS
    return f"{shown} and {rest} more" if rest > 0 else shown or "-"


def _print_sum(console: Console, reports: list[VerifyReport]) -> None:
    counts = {status: sum(r.status == status for r in reports) for status in _COLORS}
    nbytes = sum(report.bytes for report in reports)
    seconds = sum(report.seconds for report in reports)
    texts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(
        f"{len(reports)} files: {texts}; {format_bytes(nbytes)}, "
        f"{format_bandwidth(nbytes / seconds if seconds else 0)}"
    )


def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    records: Annotated[bool, typer.Option("--records", help="List the zip records, too.")] = False,
) -> None:
    """Show what a checkpoint holds. Reads no tensor's bytes and executes nothing.

    Exit status: 0, 1 if the file is damaged, 2 if it cannot be read.
    """
    from fastserial.errors import CorruptCheckpointError
    from fastserial.inspection import inspect as look

    try:
        found = look(path)
    except CorruptCheckpointError as error:
        typer.echo(f"damaged: {error}", err=True)
        raise typer.Exit(_DAMAGED) from None
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    _print_inspection(new_console(), found, records)


def _print_inspection(console: Console, found: Inspection, records: bool) -> None:
    name = os.path.basename(found.path)
    console.print(
        f"{escape(name)}: {found.format}, {format_bytes(found.bytes)}, "
        f"{len(found.tensors)} tensors, {len(found.storages)} storages, {found.values} other values"
    )
    console.print(escape("; ".join(found.hints)))
    _print_tensors(console, found)
    _print_sharing(console, found)
    if records:
        rows = [(n, str(o), format_bytes(b)) for n, o, b in found.records]
        console.print(_table(f"{len(rows)} records", ("record", "byte", "size"), rows))
    if found.imports:
        console.print(
            f"unpickling would import: {escape(', '.join(found.imports))}", soft_wrap=True
        )
    for note in found.notes:
        console.print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 1))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def _print_tensors(console: Console, found: Inspection) -> None:
    places = {storage.key: storage.offset for storage in found.storages}
    rows: list[tuple[Any, ...]] = []
    for tensor in found.tensors:
        start = places.get(tensor.storage or "")
        rows.append(
            (
                tensor.key or "(root)",
                tensor.dtype,
                list(tensor.shape),
                tensor.nbytes,
                "-" if start is None else start + tensor.span[0],
                "-" if tensor.storage is None else tensor.storage,
                tensor.kind
                if tensor.is_contiguous
                else f"{tensor.kind}, strides {list(tensor.stride)}",
            )
        )
    columns = ("tensor", "dtype", "shape", "bytes", "at byte", "storage", "kind")
    console.print(_table(f"{len(rows)} tensors", columns, rows))


def _print_sharing(console: Console, found: Inspection) -> None:
    rows = [
        (s.key, s.nbytes, s.wasted_bytes or "-", _some(s.tensors))
        for s in found.storages
        if s.is_shared or s.wasted_bytes
    ]
    if rows:
        columns = ("storage", "bytes", "could be saved", "tensors")
        console.print(_table("Storages shared or larger than need be", columns, rows))
    if found.wasted_bytes:
        console.print(
            f"{format_bytes(found.wasted_bytes)} could be saved: views drag their whole storage "
            "along; clone() them before saving"
        )
