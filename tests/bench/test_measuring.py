"""What the benchmarks are built on: what they compare, how they count, what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastserial.bench import rotation, save
from fastserial.bench.measure import BenchError, Sample
from fastserial.bench.rotation import (
    DURABLE,
    LOOSE,
    Measured,
    Row,
    rotate,
    summarize,
)
from fastserial.bench.table import Spread, Table

RUNS = 2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rotation, save):
        monkeypatch.setattr(module, "settle", lambda pause: None)


def sample(seconds: float, nbytes: int = 1000) -> Sample:
    return Sample(nbytes, seconds, seconds / 2, 100)


# --- measuring --------------------------------------------------------------------------------


def writer(name: str, order: list[str], data: bytes, **more: Any) -> Row:
    def run(path: Path) -> Sample:
        order.append(f"{name} {path.suffix}")
        path.write_bytes(data)
        return sample(len(order))

    return Row(name, DURABLE, run, **more)


def test_rows_take_turns(tmp_path: Path) -> None:
    def absent(path: Path) -> Sample:
        raise BenchError("not here")

    order: list[str] = []
    rows = [
        writer("stock", order, b"abc"),
        writer("good", order, b"abc", same_bytes_as="stock", stock="stock"),
        writer("bad", order, b"abd", same_bytes_as="stock"),
        writer("read back", order, b"abd", check=lambda path: path.read_bytes() == b"abd"),
        writer("wrong", order, b"abd", check=lambda path: len(order) < 6),
        Row("absent", DURABLE, absent, optional=True),
    ]
    measured = rotate(rows, tmp_path, RUNS)
    assert [word.rpartition(" ")[0] for word in order] == [row.name for row in rows[:5]] * 3
    assert len(set(order)) == 15  # a new name each time
    assert [len(one.samples) for one in measured] == [2, 2, 2, 2, 2, 0]
    assert [one.identical for one in measured] == [None, True, False, None, None, None]
    assert [one.equal for one in measured] == [None, None, None, True, False, None]
    assert measured[-1].problem == "not here"
    assert list(tmp_path.iterdir()) == []
    found = Table(summarize(measured), [])
    assert [row["name"] for row in found.rows] == ["stock", "good", "bad", "read back", "wrong"]
    assert not found.right
    with pytest.raises(BenchError):
        rotate([Row("absent", DURABLE, absent)], tmp_path, RUNS)


# --- counting ---------------------------------------------------------------------------------


def test_summary() -> None:
    def row(name: str, group: str = DURABLE, stock: str | None = None) -> Row:
        return Row(name, group, lambda path: sample(1), stock)

    rows = [row("fio"), row("stock"), row("fast", DURABLE, "stock")]
    times = [[1.0, 2.0], [8.0, 8.0], [2.0, 1.0]]
    measured = [Measured(row, [sample(t) for t in ts]) for row, ts in zip(rows, times, strict=True)]
    measured.append(Measured(row("loose", LOOSE, "absent"), [sample(1), sample(1)]))
    lines = {line["name"]: line for line in summarize(measured, "fio")}
    fast = lines["fast"]
    assert fast["to_fio"] == Spread(1.25, 0.5, 2.0)  # round by round
    assert fast["to_stock"] == Spread(6, 4, 8)
    assert lines["stock"]["to_stock"] == Spread(1, 1, 1)
    assert lines["loose"]["to_fio"] is None
    assert lines["loose"]["to_stock"] is None
    assert lines["stock"]["cpu_seconds_per_gb"].median == pytest.approx(4e6)
    assert fast["extra_bytes"] == 100
