"""How saves scale: with the size of the checkpoint, and with the number of tensors.

Two curves, each point an interleaved comparison of stock zip, fastserial zip and safetensors. Timed
is the whole call with the fsync of file and directory. Bandwidth is tensor data per second, headers
left out, so that ratios are ratios of time. Below 4 MiB a save takes milliseconds and varies more,
so there are four times as many rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Picture, Say, Script, size
from peers import safetensors_row

from fastserial.bench.measure import Sample
from fastserial.bench.payload import mixed_state
from fastserial.bench.rotation import Row, rotate, summarize
from fastserial.bench.state import check_memory, scratch
from fastserial.bench.table import CHECKED, Column, Result, Table, number
from fastserial.bench.torch_rows import fast, fast_row, stock_row
from fastserial.reports import format_bytes

_FIRST_SIZE, _SIZE_FACTOR = 1 << 10, 4
_TENSORS_PER_SIZE = 16  # the same at every size, so that only the size changes
_COUNT_FACTOR = 10
_QUICK, _QUICK_REPEATS = 4 << 20, 4
_HEADROOM = 256 << 20
_HEADER_BYTES = 512  # of a tensor, in the most talkative container
_COLUMNS = (
    Column("data_bytes", "bytes", number()),
    Column("tensors", "tensors", number()),
    Column("seconds", "msec", number(1e-3, 2)),
    Column("to_stock", "× stock", number(1, 2)),
    *CHECKED,
)


def _measure(options: argparse.Namespace, say: Say) -> Result:
    with fast():  # before minutes are spent on other rows
        pass
    needed = max(options.max_size, options.total + options.max_tensors * _HEADER_BYTES)
    check_memory(needed, "give a smaller --max-size, --total or --max-tensors")
    missing = {}
    if importlib.util.find_spec("safetensors") is None:
        missing["safetensors"] = "not installed: pip install safetensors"
    curves: dict[str, list[dict[str, Any]]] = {"against the size": [], "against the tensors": []}
    by_size, by_count = curves.values()
    with scratch(options.folder, needed + _HEADROOM) as folder:
        for nbytes in _geometric(_FIRST_SIZE, options.max_size, _SIZE_FACTOR):
            say(f"{format_bytes(nbytes)} in {_TENSORS_PER_SIZE} tensors")
            state = mixed_state(nbytes, _TENSORS_PER_SIZE)
            by_size += _point(state, options, folder, nbytes)
        for count in _geometric(1, options.max_tensors, _COUNT_FACTOR):
            say(f"{count:,} tensors")
            by_count += _point(_equal_state(options.total, count), options, folder, count)
    caption = (
        f"medians of {options.runs} or {options.runs * _QUICK_REPEATS} interleaved runs "
        "(least–greatest), file and directory synced"
    )
    settings = {"max_bytes": options.max_size, "max_tensors": options.max_tensors}
    tables = [Table(rows, _COLUMNS, title) for title, rows in curves.items()]
    return Result("sizes", options.folder, caption, settings, tables, missing)


def _point(
    state: dict[str, torch.Tensor], options: argparse.Namespace, folder: Path, x: int
) -> Iterator[dict[str, Any]]:
    """Measure one state dict; its rows have `x`, their place on the curve."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    rows = [stock_row(state, "zip"), fast_row(state, "zip")]
    if importlib.util.find_spec("safetensors") is not None:
        rows.append(safetensors_row(state))
    runs = options.runs * (_QUICK_REPEATS if nbytes < _QUICK else 1)
    rows = [_of_data(row, nbytes) for row in rows]
    for row in summarize(rotate(rows, folder, runs, options.pause)):
        del row["group"]
        yield {**row, "x": x, "data_bytes": nbytes, "tensors": len(state)}


def _of_data(row: Row, nbytes: int) -> Row:
    """Return the row with the bytes of tensor data, not of the file, in its samples."""

    def run(path: Path) -> Sample:
        return replace(row.run(path), nbytes=nbytes)

    return replace(row, run=run)


def _equal_state(nbytes: int, tensors: int) -> dict[str, torch.Tensor]:
    """Return a state dict in tensors of one size, 8 bytes at least, each with its own storage."""
    generator = torch.Generator().manual_seed(0)
    words = max(1, nbytes // tensors // 8)
    data = torch.empty((tensors, words), dtype=torch.int64).random_(generator=generator)
    return {f"layers.{i}.weight": row.clone().view(torch.float32) for i, row in enumerate(data)}


def _geometric(first: int, last: int, factor: int) -> list[int]:
    values = []
    value = first
    while value < last:
        values.append(value)
        value *= factor
    return [*values, last]


if __name__ == "__main__":
    brief = {"max_size": 4 << 20, "max_tensors": 1000, "total": 8 << 20, "runs": 1}
    picture = Picture(x="x", log=True, label="GB/s (10⁹ bytes of tensor data per second)")
    script = Script(__doc__, "half an hour", brief, picture)
    script.parser.set_defaults(runs=5, pause=0.05)
    script.add("--max-size", type=size, default=1 << 30, help="the largest; the first is 1 KiB")
    script.add("--max-tensors", type=int, default=200_000, help="the most tensors")
    script.add("--total", type=size, default=256 << 20, help="bytes of the many tensors together")
    script.run(_measure)
