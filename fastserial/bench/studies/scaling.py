"""`fastserial bench scaling`: how saves scale with the checkpoint's size and number of tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from fastserial.bench.measuring.machine import Place
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.rotation import Plan, rotate
from fastserial.bench.measuring.rows import Row
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.summary import Line, summarize
from fastserial.bench.subjects.payload import check_memory, equal_state, mixed_state
from fastserial.bench.subjects.peers import safetensors_row
from fastserial.bench.subjects.saving import check_torch
from fastserial.bench.subjects.torch_rows import fast_row, stock_row
from fastserial.config import current

__all__ = ["Axis", "Point", "ScalingBench", "ScalingResult", "run_scaling", "sizes", "steps"]

Axis = Literal["size", "tensors"]
_FIRST_SIZE, _SIZE_FACTOR = 1 << 10, 4
_TENSORS_PER_SIZE = 16  # the same at every size, so that only the size changes
_COUNT_FACTOR = 10
_QUICK = 4 << 20  # bytes; below, a save takes milliseconds and varies more
_QUICK_REPEATS = 4
_HEADROOM = 256 << 20
_HEADER_BYTES = 512  # of a tensor, in the most talkative container


@dataclass(frozen=True, slots=True)
class ScalingBench:
    """What to measure.

    Attributes:
        folder: where to write.
        max_bytes: the largest checkpoint of the first curve, which begins at 1 KiB.
        max_tensors: the most tensors of the second curve, which begins at one.
        total_bytes: what the tensors of the second curve hold together.
        runs: rounds that count, four times as many for checkpoints below 4 MiB.
        pause: seconds of rest between two runs.
    """

    folder: Path
    max_bytes: int = 1 << 30
    max_tensors: int = 200_000
    total_bytes: int = 256 << 20
    runs: int = 5
    pause: float = 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """One state dict: the curve it is on, its bytes of tensor data, its tensors, its rows.

    Bandwidths are bytes of tensor data per second, without headers: so they compare times.
    """

    axis: Axis
    nbytes: int
    tensors: int
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class ScalingResult:
    """What was measured, where, and with what options of fastserial.

    Attributes:
        missing: rows that are not there, and why.
    """

    bench: ScalingBench
    place: Place
    points: tuple[Point, ...]
    missing: dict[str, str]

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found in anything that was written."""
        return all(line.right for point in self.points for line in point.lines)


def sizes(largest: int) -> list[int]:
    """Return the sizes to measure, the asked one last."""
    return _geometric(_FIRST_SIZE, largest, _SIZE_FACTOR)


def steps(most: int) -> list[int]:
    """Return the numbers of tensors to measure, the asked one last."""
    return _geometric(1, most, _COUNT_FACTOR)


def run_scaling(
    bench: ScalingBench, say: Callable[[str], None] = lambda text: None
) -> ScalingResult:
    """Measure both curves; `say` receives a text for each step.

    Raises:
        BenchError: too little memory or disk, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_torch()
    needed = max(bench.max_bytes, bench.total_bytes + bench.max_tensors * _HEADER_BYTES)
    check_memory(needed, "give a smaller --max-size, --total or --max-tensors")
    missing = {}
    if importlib.util.find_spec("safetensors") is None:
        missing["safetensors"] = "not installed: pip install safetensors"
    points = []
    with scratch(bench.folder, needed + _HEADROOM) as folder:
        for nbytes in sizes(bench.max_bytes):
            state = mixed_state(nbytes, _TENSORS_PER_SIZE)
            points.append(_measure("size", state, bench, folder, say))
        for count in steps(bench.max_tensors):
            state = equal_state(bench.total_bytes, count)
            points.append(_measure("tensors", state, bench, folder, say))
    return ScalingResult(
        bench,
        Place.of(bench.folder, current()),
        tuple(points),
        missing,
    )


def _measure(
    axis: Axis,
    state: dict[str, torch.Tensor],
    bench: ScalingBench,
    folder: Path,
    say: Callable[[str], None],
) -> Point:
    nbytes = sum(tensor.nbytes for tensor in state.values())
    rows = [stock_row(state, "zip"), fast_row(state, "zip")]
    if importlib.util.find_spec("safetensors") is not None:
        rows.append(safetensors_row(state))
    plan = Plan(bench.runs * (_QUICK_REPEATS if nbytes < _QUICK else 1), pause=bench.pause)
    where = f"{axis}: {nbytes:,} bytes in {len(state):,} tensors, "
    measured = rotate(
        [_of_data(row, nbytes) for row in rows], folder, plan, lambda text: say(where + text)
    )
    return Point(axis, nbytes, len(state), tuple(summarize(measured)))


def _of_data(row: Row, nbytes: int) -> Row:
    """Return the row with the bytes of tensor data, not of the file, in its samples."""

    def run(path: Path) -> Sample:
        return replace(row.run(path), nbytes=nbytes)

    return replace(row, run=run)


def _geometric(first: int, last: int, factor: int) -> list[int]:
    values = []
    value = first
    while value < last:
        values.append(value)
        value *= factor
    return [*values, last]
