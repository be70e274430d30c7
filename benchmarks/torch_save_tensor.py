"""One tensor, saved with every writer there is, in turn, fio among them.

Timed is the whole call; durable rows include the fsync of file and directory. What was written is
read back, or compared byte by byte; exit status 1 if it is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from common import Say, Script
from peers import peer_rows

from fastserial.bench.rotation import DURABLE, LOOSE
from fastserial.bench.save import SaveBench, run_save
from fastserial.bench.table import Result
from fastserial.bench.torch_rows import Format

__all__ = ["add_writer_options", "save_with_all"]


def add_writer_options(script: Script) -> None:
    """Add the options that this script shares with `torch_save_model.py`."""
    script.add("--zipfile", action="store_true", help="only torch's zip format")
    script.add("--legacy", action="store_true", help="only torch's legacy format")
    script.add("--gpu", action="store_true", help="the tensors are on the CUDA device")
    script.add("--io_buffer_mb", type=int, default=64, help="MiB of DeepSpeed's writer's buffer")
    script.add("--no-loose", action="store_true", help="without rows that are not durable")
    script.add("--no-peers", action="store_true", help="without other engines and packages")
    script.add("--no-fio", action="store_true", help="without fio")


def _formats(options: argparse.Namespace) -> tuple[Format, ...]:
    """Return the containers that are wanted: both without any option."""
    if options.zipfile == options.legacy:
        return ("zip", "legacy")
    return ("zip",) if options.zipfile else ("legacy",)


def save_with_all(
    options: argparse.Namespace,
    name: str,
    say: Say,
    nbytes: int = 0,
    subject: tuple[str, Callable[[], dict[str, Any]]] | None = None,
) -> Result:
    """Save with torch's writers, ours, and those of other packages.

    Args:
        name: of the script.
        nbytes: of the one tensor that is saved.
        subject: what is saved instead, as for `run_save`.
    """
    bench = SaveBench(
        folder=options.folder,
        nbytes=nbytes,
        tensors=1,
        gpu=options.gpu,
        formats=_formats(options),
        runs=options.runs,
        groups=(DURABLE,) if options.no_loose else (DURABLE, LOOSE),
        with_engines=not options.no_peers,
        with_fio=not options.no_fio,
        pause=options.pause,
    )
    peers = partial(peer_rows, loose=not options.no_loose, io_buffer_mb=options.io_buffer_mb)
    return run_save(bench, say, None if options.no_peers else peers, name, subject)


def _measure(options: argparse.Namespace, say: Say) -> Result:
    return save_with_all(options, "torch_save_tensor", say, options.mb_size << 20)


if __name__ == "__main__":
    script = Script(__doc__, "five minutes for each GiB", {"mb_size": 32, "runs": 1})
    script.add("--mb_size", type=int, default=1024, help="MiB of the tensor")
    add_writer_options(script)
    script.run(_measure)
