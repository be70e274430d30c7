"""`fastserial inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fastserial.cli.verify import CANNOT_TELL, DAMAGED, files_of, some
from fastserial.console import counted, new_console, print_table, say
from fastserial.reports import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from fastserial.checkpoints.inspect import Inspection

__all__ = ["inspect"]


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|DIR",
            help="A zip, legacy or safetensors checkpoint, a DCP folder, or a folder of these.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    records: Annotated[bool, typer.Option("--records", help="List records or items, too.")] = False,
) -> None:
    """Show what a checkpoint contains. Reads no tensor's bytes and executes nothing.

    Exit status: 0, 1 if it is damaged, 2 if it cannot be read.
    """
    from fastserial.checkpoints.inspect import inspect as look
    from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError

    console = new_console()
    seen: list[Inspection] = []
    states: set[int] = set()
    names = list(files_of(path)) or [str(path)]  # which says what the folder is
    for name in names:
        try:
            found = look(name)
        except UnreadableCheckpointError as error:
            say(f"unreadable: {error}", err=True)
            states.add(CANNOT_TELL)
        except CorruptCheckpointError as error:
            say(f"damaged: {error}", err=True)
            states.add(DAMAGED)
        else:
            seen.append(found)
            if not as_json:
                _print_inspection(console, found, records)
    if as_json and seen:
        all_ = [found.to_dict() for found in seen]
        typer.echo(json.dumps(all_[0] if len(names) == 1 else {"files": all_}, indent=2))
    if states:
        raise typer.Exit(min(states))


def _print_inspection(console: Console, found: Inspection, records: bool) -> None:
    console.print(
        f"{escape(found.path)}: {found.format}, {format_bytes(found.bytes)}, "
        f"{counted(len(found.tensors), 'tensor')}, {counted(len(found.storages), 'storage')}, "
        f"{counted(found.values, 'other value')}",
        soft_wrap=True,
    )
    _print_tensors(console, found)
    _print_sharing(console, found)
    if records:
        rows = [(n, str(o), format_bytes(b)) for n, o, b in found.records]
        print_table(console, counted(len(rows), "record"), ("record", "byte", "size"), rows)
    if found.imports:
        console.print(
            f"unpickling would import: {escape(', '.join(found.imports))}", soft_wrap=True
        )
    for note in found.notes:
        console.print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)


def _print_tensors(console: Console, found: Inspection) -> None:
    rows: list[tuple[Any, ...]] = []
    for tensor, offset in zip(found.tensors, found.offsets(found.tensors), strict=True):
        strides = "" if tensor.is_contiguous else f", strides {list(tensor.stride)}"
        rows.append(
            (
                tensor.key or "(root)",
                tensor.dtype,
                list(tensor.shape),
                tensor.nbytes,
                "-" if offset is None else offset,
                "-" if tensor.storage is None else tensor.storage,
                tensor.kind + strides,
            )
        )
    columns = ("tensor", "dtype", "shape", "bytes", "at byte", "storage", "kind")
    if rows:
        print_table(console, counted(len(rows), "tensor"), columns, rows)


def _print_sharing(console: Console, found: Inspection) -> None:
    rows = [
        (s.key, s.nbytes, s.wasted_bytes or "-", some(s.tensors))
        for s in found.storages
        if s.is_shared or s.wasted_bytes
    ]
    if rows:
        columns = ("storage", "bytes", "could be saved", "tensors")
        print_table(console, "Storages shared or larger than need be", columns, rows)
    if found.wasted_bytes:
        console.print(
            f"{format_bytes(found.wasted_bytes)} could be saved: torch saves the whole storage of "
            "a view; clone() views before saving"
        )
