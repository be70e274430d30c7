"""`fastserial inspect`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from fastserial.cli.verify import CANNOT_TELL, DAMAGED, files_of, some
from fastserial.console import counted, print_table, say
from fastserial.reports import format_bytes

if TYPE_CHECKING:
    from fastserial.checkpoints.inspect import Inspection


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL|DIR",
            help="A zip, legacy or safetensors checkpoint, a DCP folder, or a folder of these.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    records: Annotated[bool, typer.Option("--records", help="List records or items, too.")] = False,
) -> None:
    """Show what a checkpoint contains. Reads no tensor's bytes and executes nothing.

    Exit status: 0 on success, 1 if it is damaged, 2 if it cannot be read.
    """
    from fastserial.checkpoints.inspect import inspect as look
    from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError

    seen: list[Inspection] = []
    states: set[int] = set()
    names = list(files_of(path)) or [path]  # which says what the folder is
    for name in names:
        try:
            seen.append(look(name))
        except UnreadableCheckpointError as error:
            say(f"unreadable: {error}", err=True)
            states.add(CANNOT_TELL)
        except CorruptCheckpointError as error:
            say(f"damaged: {error}", err=True)
            states.add(DAMAGED)
        else:
            if not as_json:
                _print_inspection(seen[-1], records)
    if as_json and seen:
        found = [one.to_dict() for one in seen]
        typer.echo(json.dumps(found[0] if len(names) == 1 else {"files": found}, indent=2))
    if states:
        raise typer.Exit(min(states))


def _print_inspection(found: Inspection, records: bool) -> None:
    counts = (
        counted(len(found.tensors), "tensor"),
        counted(len(found.storages), "storage"),
        counted(found.values, "other value"),
    )
    say(f"{found.path}: {found.format}, {format_bytes(found.bytes)}, {', '.join(counts)}")
    tensors = [
        (
            tensor.key or "(root)",
            tensor.dtype,
            list(tensor.shape),
            tensor.nbytes,
            "-" if offset is None else offset,
            "-" if tensor.storage is None else tensor.storage,
            tensor.kind,
            "" if tensor.is_contiguous else f"strides {list(tensor.stride)}",
        )
        for tensor, offset in zip(found.tensors, found.offsets(found.tensors), strict=True)
    ]
    if tensors:
        print_table(
            ("tensor", "dtype", "shape", "bytes", "at byte", "storage", "kind", ""), tensors
        )
    shared = [(one.key, one.nbytes, some(one.tensors)) for one in found.storages if one.tensors[1:]]
    if shared:
        print_table(("shared storage", "bytes", "tensors"), shared)
    if records:
        print_table(("record", "byte", "bytes"), found.records)
    if found.imports:
        say(f"unpickling would import: {', '.join(found.imports)}")
    for note in found.notes:
        say(f"note: {note}")
