"""`fastserial convert`."""

from __future__ import annotations

import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fastserial.console import say
from fastserial.reports import format_bytes


class TargetFormat(str, Enum):
    """Containers that can be written."""

    zip = "zip"
    safetensors = "safetensors"
    dcp = "dcp"


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A zip, legacy or safetensors checkpoint, an index of safetensors files, "
            "or a folder of DCP."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The new file or folder.")],
    to: Annotated[
        TargetFormat | None, typer.Option("--to", help="Default: by the target's name, else zip.")
    ] = None,
    key: Annotated[str, typer.Option(help="Convert this part only (`model`).")] = "",
    copy_shared: Annotated[
        bool, typer.Option("--copy-shared", help="Write shared tensors several times.")
    ] = False,
    shard_size: Annotated[
        str, typer.Option(help="Write safetensors files of this size at most, with an index.")
    ] = "",
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check every checksum first.")
    ] = True,
) -> None:
    """Write a checkpoint in another format. Executes no code of a checkpoint.

    `dcp` is a folder for torch.distributed.checkpoint.

    Exit status: 0 on success, 1 if the source is damaged, 2 if the source cannot be read or
    the new format cannot hold it. After an error the previous target is intact.
    """
    from fastserial.config import current, parse_size
    from fastserial.distributed.convert import convert as run

    # torch warns of what either succeeds, or raises an error of ours with a remedy
    warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
    done = run(
        source,
        target,
        to.value if to else None,
        key=key,
        copy_shared=copy_shared,
        shard_nbytes=parse_size(shard_size) if shard_size else None,
        verify=verify,
        config=current(progress=sys.stderr.isatty()),
    )
    say(f"{done.source} -> {done.target}: {format_bytes(done.nbytes)} in {target}")
    if done.dropped:
        names = ", ".join(map(ascii, done.dropped))
        say(f"not kept, since the format cannot hold it: metadata {names}", err=True)
