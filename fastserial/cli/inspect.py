"""`fastserial inspect`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastserial.cli.verify import CANNOT_TELL, DAMAGED, OK, files_of, some
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

    Exit status: 0 on success, 1 if one is damaged, 2 if one cannot be read.
    """
    from fastserial.checkpoints.inspect import inspect as look
    from fastserial.errors import CorruptCheckpointError, FastserialError

    files: list[dict[str, Any]] = []
    errors: list[dict[str, str]] = []
    states: set[int] = set()
    for name in list(files_of(path)) or [path]:  # which says what the folder is
        try:
            found = look(name)
            if as_json:
                files.append(found.to_dict())
            else:
                _print_inspection(found, records)
        except (FastserialError, OSError) as error:
            damaged = isinstance(error, CorruptCheckpointError)
            states.add(DAMAGED if damaged else CANNOT_TELL)
            word = "damaged" if damaged else "unreadable"
            errors.append({"path": name, "status": word, "message": str(error)})
            say(f"{word}: {error}", err=True)
    status = min(states, default=OK)
    if as_json:
        typer.echo(json.dumps({"status": status, "files": files, "errors": errors}, indent=2))
    raise typer.Exit(status)


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
