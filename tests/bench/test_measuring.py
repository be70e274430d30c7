"""What the benchmarks are built on: what they compare, how they count, what they leave."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from fastserial.bench import fio, rotation, save, table
from fastserial.bench.fio import FioSettings
from fastserial.bench.measure import BenchError, Sample, measure
from fastserial.bench.payload import different_tensors, digest
from fastserial.bench.rotation import (
    DURABLE,
    GROUPS,
    LOOSE,
    Measured,
    Row,
    rotate,
    summarize,
)
from fastserial.bench.table import Column, Result, Spread, Table, number
from fastserial.bench.torch_rows import (
    Format,
    engine_rows,
    stock_row,
    torch_rows,
    zip_holds,
)

RUNS = 2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rotation, save):
        monkeypatch.setattr(module, "settle", lambda pause: None)


def sample(seconds: float, nbytes: int = 1000) -> Sample:
    return Sample(nbytes, seconds, seconds / 2, 100)


# --- comparing --------------------------------------------------------------------------------


def test_what_differs_is_seen(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for left, right in ((b"abc", b"abc"), (b"abc", b"abd"), (b"ab", b"abc")):
        one.write_bytes(left)
        two.write_bytes(right)
        assert (digest(one) == digest(two)) is (left == right)
    nan = torch.tensor([float("nan")])
    assert different_tensors({"a": nan, "b": nan}, {"a": nan.clone(), "b": nan.clone()}) == []
    assert different_tensors({"a": nan}, {"b": nan}) == ["a", "b"]
    assert different_tensors({"a": nan}, {"a": nan.double()}) == ["a"]
    assert different_tensors({"a": torch.zeros(())}, {"a": torch.zeros(1)}) == ["a"]


def test_stock_is_read_back(tmp_path: Path) -> None:
    mark = bytes(range(200, 240))
    marked = {"b": torch.frombuffer(bytearray(mark * 100), dtype=torch.uint8), "lr": 0.1}
    path = tmp_path / "file.pt"
    row = stock_row(marked, "zip")
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # else torch finds the damage by itself
    try:
        row.run(path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert row.check is not None
    assert row.check(path)
    assert not zip_holds({**marked, "more": torch.ones(1)}, path)
    path.write_bytes(path.read_bytes().replace(mark, bytes(len(mark)), 1))
    assert not row.check(path)


# --- measuring --------------------------------------------------------------------------------


def test_measure_sees_memory_and_time() -> None:
    size = 64 << 20

    def work() -> None:
        torch.ones(size // 4)

    used = measure(work)
    assert used.seconds > 0
    assert used.cpu_seconds > 0
    if used.extra_bytes is not None:
        assert 0.9 * size < used.extra_bytes < 1.5 * size
        again = measure(lambda: None)
        assert again.extra_bytes is not None
        assert again.extra_bytes < size / 2


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


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_torch_rows(tmp_path: Path, container: Format) -> None:
    value = {"a": torch.arange(100_000), "b": torch.zeros(3)}
    before = torch.serialization._save
    rows = torch_rows(value, (container,), GROUPS)
    others, missing = engine_rows(value, (container,))
    measured = rotate([*rows, *others], tmp_path, RUNS)
    assert len({row.name for row in rows}) == len(rows) == 6
    for one in measured:
        assert one.identical is (True if "fastserial" in one.row.name else None)
        assert one.samples[0].nbytes >= 800_000
    assert missing.keys() | {one.row.name for one in measured} >= {"fastserial " + container}
    assert torch.serialization._save is before
    assert list(tmp_path.iterdir()) == []


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


# --- fio --------------------------------------------------------------------------------------

WORDS = {
    "error": 0,
    "write": {"io_bytes": 8 << 20, "runtime": 40},
    "usr_cpu": 10.0,
    "sys_cpu": 15.0,
    "job_runtime": 40,
}


def fake_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = folder / "bin" / "fio"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)


def test_fio_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"jobs": [WORDS]})
    log = tmp_path / "log"
    script = f"echo \"$@ $GLIBC_TUNABLES\" > {log}\necho 'fio: note'\necho '{answer}'"
    fake_fio(tmp_path, monkeypatch, script)
    found = fio.run_fio(FioSettings("libaio", 1 << 20), tmp_path / "a:b", 8_000_000)
    assert found.seconds == pytest.approx(0.04)
    assert found.nbytes == 8 << 20
    assert found.cpu_seconds == pytest.approx(0.01)
    asked = log.read_text()
    for word in (
        "--end_fsync=1",
        "--direct=1",
        "--fallocate=native",
        "a\\:b",
        "--size=8388608",
        "hugetlb=1",
    ):
        assert word in asked


# --- tables -----------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"name": "stock", "seconds": Spread(2, 1, 3), "identical": None, "runs": [1, 2, 3]},
    {"name": "[ours]", "seconds": Spread(1, 1, 1), "identical": True, "runs": [1, 1, 1]},
    {"name": "theirs", "problem": "[no] room"},
]


def test_a_table_prints_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("seconds", "ms", number(1e-3)), Column("identical", "same", table.verdict)]
    result = Result("test", tmp_path, "a caption", {"x": 1}, [Table(ROWS, columns, "a title")])
    result.show()
    text = capsys.readouterr().out
    for words in ("a title", "2,000 (1,000–3,000)", "[ours]", "[no] room", "a caption", "yes"):
        assert words in text
    result.write(tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tables"][0]["rows"][0]["seconds"] == {"median": 2, "low": 1, "high": 3}
    assert found["machine"]["cores"] > 0
    assert found["command"]
    assert result.right
    wrong = [*ROWS, {"name": "wrong", "identical": False}]
    result = Result("test", tmp_path, "", {}, [Table(wrong, columns)])
    result.show()
    assert "WRONG" in capsys.readouterr().out
