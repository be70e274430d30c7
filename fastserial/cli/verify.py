"""`fastserial verify`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fastserial.config import current
from fastserial.console import counted, print_table, say
from fastserial.reports import format_bandwidth, format_bytes

if TYPE_CHECKING:
    from fastserial.checkpoints.verify.report import VerifyReport


OK, DAMAGED, CANNOT_TELL = 0, 1, 2
_STATUS = {"ok": OK, "damaged": DAMAGED, "unchecked": CANNOT_TELL, "unreadable": CANNOT_TELL}
_UNITS = {"dcp": "item", "safetensors": "tensor", "file list": "file"}
_SHOWN_TENSORS = 3


def verify(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILE|URL|DIR...", help="Checkpoints, or folders of them."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Drop files from the page cache first: checks what the device holds."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only what is wrong.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where checksums do not prove it whole.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read.")] = None,
) -> None:
    """Check every checksum and the structure of checkpoints. Executes nothing in them.

    In a folder, also check that the files named by an index of shards or by
    fastserial_complete.json exist. safetensors and legacy files have no checksums: structure only.

    Exit status: 0 if all are whole, 1 if one is damaged, 2 if one cannot be checked, in whole or in
    part, or is not a checkpoint. With --strict also 1 if a part was not checked or has no checksum.
    """
    from fastserial.checkpoints.verify import verify as check
    from fastserial.checkpoints.verify.file_list import file_lists_in

    config = current(
        **({"threads": threads} if threads else {}), progress=sys.stderr.isatty() and not quiet
    )
    reports: list[VerifyReport] = []
    nothing: list[str] = []
    for path in paths:
        names = [*files_of(path), *file_lists_in(path)]
        if not names:
            nothing.append(path)
        for name in names:
            reports.append(check(name, config, cold=cold))
            right = reports[-1].fully_checked if strict else reports[-1].ok
            if not as_json and not (quiet and right):
                _print_report(reports[-1])
    states = {_status_of(one, strict) for one in reports} | {CANNOT_TELL for _ in nothing}
    status = next(one for one in (DAMAGED, CANNOT_TELL, OK) if one in states or one == OK)
    if as_json:
        files = [asdict(report) for report in reports]
        result = {"status": status, "files": files, "no_checkpoints_in": nothing}
        typer.echo(json.dumps(result, indent=2))
    else:
        for name in nothing:
            say(f"no checkpoints in {name}", err=True)
        if not quiet and len(reports) > 1:
            counts = {word: sum(one.status == word for one in reports) for word in _STATUS}
            facts = [f"{count} {word}" for word, count in counts.items() if count]
            bare = sum(one.no_checksums for one in reports)
            facts += [f"{bare} without checksums"] if bare else []
            say(f"{len(reports)} checkpoints: {', '.join([*facts, *_amounts(reports)])}")
    raise typer.Exit(status)


def _status_of(report: VerifyReport, strict: bool) -> int:
    if strict and report.status in ("ok", "unchecked") and not report.fully_checked:
        return DAMAGED
    return _STATUS[report.status]


def files_of(path: str) -> Iterator[str]:
    """Yield a checkpoint, or those in a folder."""
    from fastserial.checkpoints.verify import checkpoints_in

    if os.path.isdir(path):
        yield from checkpoints_in(path)
    else:
        yield path


def some(names: tuple[str, ...]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(name or "(root)" for name in names[:_SHOWN_TENSORS])
    rest = len(names) - _SHOWN_TENSORS
    return f"{shown} and {rest} more" if rest > 0 else shown or "-"


def _print_report(report: VerifyReport) -> None:
    facts: list[str] = []
    if report.format is not None:
        records = counted(report.records, _UNITS.get(report.format, "record"))
        facts = [report.format, records, *_amounts([report])]
    say(f"{report.status:10} {report.path}  {', '.join(facts)}".rstrip())
    for note in report.notes:
        say(f"           {note}")
    rows = [
        (
            problem.kind,
            problem.file or "-",
            problem.record or "-",
            "-" if problem.offset is None else problem.offset,
            some(problem.tensors),
            problem.message,
        )
        for problem in report.problems
    ]
    if rows:
        print_table(("kind", "file", "record", "byte", "tensors", "what is wrong"), rows)
    if report.found > len(rows):
        say(f"... and {report.found - len(rows)} more")


def _amounts(reports: Sequence[VerifyReport]) -> Iterator[str]:
    """Yield the size of checkpoints, and how fast those were read of which all was read."""
    yield format_bytes(sum(report.bytes for report in reports))
    read = [report for report in reports if report.checked_bytes]
    seconds = sum(report.seconds for report in read)
    if seconds:
        yield format_bandwidth(sum(report.checked_bytes for report in read) / seconds)
