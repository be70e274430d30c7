"""The small cases: where fixed costs count, not bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastserial.bench.measuring.rotation import Plan, rotate
from fastserial.bench.measuring.rows import Row
from fastserial.bench.measuring.summary import Line, summarize
from fastserial.bench.subjects.payload import many_small, one_small
from fastserial.bench.subjects.saving import Format
from fastserial.bench.subjects.torch_rows import fast_row, stock_row

__all__ = ["SmallCase", "small_cases"]

_TENSORS, _TENSOR_BYTES = 20_000, 4096
_OBJECT_BYTES = 1024
_REPEATS = 20  # a save of milliseconds needs more runs than one of seconds


@dataclass(frozen=True, slots=True)
class SmallCase:
    """A case and its lines; here times are compared, not bandwidths."""

    name: str
    lines: tuple[Line, ...]


def small_cases(
    folder: Path, formats: Sequence[Format], runs: int, say: Callable[[str], None]
) -> list[SmallCase]:
    """Measure many small tensors and one tiny object.

    Raises:
        WriteError: a save failed.
    """
    many, one = many_small(_TENSORS, _TENSOR_BYTES), one_small(_OBJECT_BYTES)
    return [
        _case(
            f"{_TENSORS:,} tensors of {_TENSOR_BYTES // 1024} KiB",
            _pairs(many, formats, (True,)),
            folder,
            Plan(runs, pause=0.05),
            say,
        ),
        _case(
            f"one object of {_OBJECT_BYTES // 1024} KiB",
            _pairs(one, formats, (True, False)),
            folder,
            Plan(runs * _REPEATS, warmups=3, pause=0.0),
            say,
        ),
    ]


def _pairs(state: object, formats: Sequence[Format], promises: Sequence[bool]) -> list[Row]:
    return [
        make(state, container, durable=durable)
        for container in formats
        for durable in promises
        for make in (stock_row, fast_row)
    ]


def _case(
    name: str, rows: list[Row], folder: Path, plan: Plan, say: Callable[[str], None]
) -> SmallCase:
    measured = rotate(rows, folder, plan, lambda text: say(f"{name}, {text}"))
    return SmallCase(name, tuple(summarize(measured)))
