"""`fastserial verify`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fastserial.config import current
from fastserial.console import counted, new_console, print_table, say
from fastserial.reports import format_bandwidth, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from fastserial.checkpoints.verify import VerifyReport

__all__ = ["CANNOT_TELL", "DAMAGED", "OK", "files_of", "some", "verify"]

OK, DAMAGED, CANNOT_TELL = 0, 1, 2
_SHOWN_TENSORS = 3


def verify(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR...", help="Checkpoints, or folders of them.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read.")] = None,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Drop files from the page cache first: checks what the device holds."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only what is wrong.")] = False,
) -> None:
    """Check every checksum and the structure of checkpoints. Executes nothing in them.

    In a folder also whether the files are there that an index of shards names, or
    fastserial_complete.json. safetensors and legacy files have no checksums: structure only.

    Exit status: 0 all are whole, 1 one is damaged, 2 one cannot be checked, or is no checkpoint.
    """
    from fastserial.checkpoints.verify import verify as check
    from fastserial.checkpoints.verify.file_list import file_lists_in

    config = current(
        **({"threads": threads} if threads else {}), progress=sys.stderr.isatty() and not quiet
    )
    reports: list[VerifyReport] = []
    console = new_console()
    nothing: list[str] = []
    for path in paths:
        found = False
        for name in chain(files_of(path), file_lists_in(path)):
            found = True
            report = check(name, config, cold=cold)
            reports.append(report)
            if not as_json and not (quiet and report.ok):
                _print_report(console, report)
        if not found:
            nothing.append(str(path))
    states = {report.status for report in reports}
    status = DAMAGED if "damaged" in states else OK
    if status == OK and ("unreadable" in states or nothing):
        status = CANNOT_TELL
    if as_json:
        result = {
            "status": status,
            "files": [asdict(report) for report in reports],
            "no_checkpoints_in": nothing,
        }
        typer.echo(json.dumps(result, indent=2))
    else:
        for name in nothing:
            say(f"no checkpoints in {name}", err=True)
        if not quiet and len(reports) > 1:
            _print_sum(console, reports)
    raise typer.Exit(status)


def files_of(path: Path) -> Iterator[str]:
    """Yield a checkpoint, or those in a folder."""
    from fastserial.checkpoints.verify import checkpoints_in

    if os.path.isdir(path):  # unlike `Path.is_dir`, never an error
        yield from checkpoints_in(path)
    else:
        yield str(path)


_UNITS = {"dcp": "item", "safetensors": "tensor", "file list": "file"}
_COLORS = {"ok": "green", "damaged": "red", "unreadable": "yellow"}


def _print_report(console: Console, report: VerifyReport) -> None:
    color = _COLORS[report.status]
    facts: list[str] = []
    if report.format is not None:
        records = counted(report.records, _UNITS.get(report.format, "record"))
        facts = [report.format, records, format_bytes(report.bytes), *_speed([report])]
    console.print(
        f"[{color}]{report.status:10}[/] {escape(report.path)}  {', '.join(facts)}".rstrip(),
        soft_wrap=True,
    )
    for note in report.notes:
        console.print(f"           {escape(note)}", soft_wrap=True)
    if report.problems:
        files = any(problem.file for problem in report.problems)
        rows = [
            (
                problem.kind,
                *((problem.file or "-",) if files else ()),
                problem.record or "-",
                "-" if problem.offset is None else problem.offset,
                some(problem.tensors),
                problem.message,
            )
            for problem in report.problems
        ]
        where = ("file", "item") if files else ("record",)
        print_table(console, "", ("kind", *where, "byte", "tensors", "what is wrong"), rows)
        if report.found > len(report.problems):
            console.print(f"... and {report.found - len(report.problems)} more")


def some(names: tuple[str, ...]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(name or "(root)" for name in names[:_SHOWN_TENSORS])
    rest = len(names) - _SHOWN_TENSORS
    return f"{shown} and {rest} more" if rest > 0 else shown or "-"


def _print_sum(console: Console, reports: list[VerifyReport]) -> None:
    counts = {status: sum(r.status == status for r in reports) for status in _COLORS}
    nbytes = sum(report.bytes for report in reports)
    texts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    facts = ", ".join((format_bytes(nbytes), *_speed(reports)))
    console.print(f"{len(reports)} checkpoints: {texts}; {facts}")


def _speed(reports: Sequence[VerifyReport]) -> Iterator[str]:
    """Yield how fast files were read; nothing of those of which only the structure was."""
    read = [report for report in reports if report.checked_bytes]
    seconds = sum(report.seconds for report in read)
    if seconds:
        yield format_bandwidth(sum(report.checked_bytes for report in read) / seconds)
