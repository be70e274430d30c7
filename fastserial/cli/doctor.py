"""The report of `fastserial doctor` as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from fastserial.console import new_console
from fastserial.diagnosis.examine import Diagnosis
from fastserial.diagnosis.folder import FolderFacts
from fastserial.reports import format_bytes

__all__ = ["show"]


def show(found: Diagnosis) -> None:
    """Print a diagnosis to standard output."""
    console = new_console()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(found):
        table.add_row(name, escape(text))
    console.print(table)
    console.print()
    if not found.findings:
        console.print("[green]All is well, for saves and for loads.[/green]")
    for finding in found.findings:
        mark = "[yellow]note[/yellow]"
        if finding.slow:
            mark = "[red]fails[/red]" if finding.fails else "[red]slow[/red]"
        console.print(f"{mark}  {escape(finding.text)}", soft_wrap=True)
        console.print(f"      → {escape(finding.remedy)}", soft_wrap=True)


def _lines(found: Diagnosis) -> Iterator[tuple[str, str]]:
    yield "fastserial", f"{found.fastserial} on {found.python}, {found.kernel}"
    yield "torch", _torch(found)
    yield "at start", _boot(found)
    why = "the default" if found.engine_source == "default" else f"from {found.engine_source}"
    yield "engine", f"{found.engine} ({why})"
    for engine in found.engines:
        yield "", f"{engine.name}: {engine.missing or 'available'}"
    for index, option in enumerate(found.options):
        source = "" if option.source == "default" else f"  ← {option.source}"
        yield "options" if not index else "", f"{option.name} = {option.value}{source}"
    refused = found.small_pages
    yield "huge pages", f"none: {refused}" if refused else "given when asked for"
    if found.folder is not None:
        yield from _folder(found.folder)


def _torch(found: Diagnosis) -> str:
    torch = found.torch
    if torch.version is None or torch.reason is not None:
        return f"{torch.version or 'not there'}, stays stock"
    fit = "made for it" if torch.exact else "made for another version, fits"
    check = "passed" if torch.self_check is None else torch.self_check
    gpu = "yes" if torch.cuda else "no"
    return f"{torch.version}, patch {torch.patch} ({fit}), self-check {check}, CUDA device {gpu}"


def _boot(found: Diagnosis) -> str:
    variable = "not set" if found.boot.variable is None else f"= {found.boot.variable}"
    pth = "works" if found.boot.pth else "not installed in this Python"
    return f"variable FASTSERIAL {variable}, fastserial.pth {pth}"


def _folder(folder: FolderFacts) -> Iterator[tuple[str, str]]:
    yield "folder", folder.path
    yield "", f"{folder.file_system} on {folder.device}" if folder.device else folder.file_system
    yield "", f"{format_bytes(folder.free_bytes)} free"
    if folder.problem is not None:
        yield "", f"not writable: {folder.problem}"
        return
    yield "", f"direct I/O: {_direct(folder)}"
    for name in folder.leftovers:
        yield "", f"left by a killed save: {name}"


def _direct(folder: FolderFacts) -> str:
    if folder.direct_problem is not None:
        return f"no ({folder.direct_problem})"
    if folder.alignment is None:
        return "a trial write passes, but the kernel says the file system has none"
    source = "reported by the kernel" if folder.alignment.kernel_reported else "assumed"
    return (
        f"a trial write passes; alignment {folder.alignment.memory} bytes in memory, "
        f"{folder.alignment.offset} in the file ({source})"
    )
