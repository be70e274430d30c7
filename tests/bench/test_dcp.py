"""`fastserial bench dcp`: real ranks, small states."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fastserial.bench.cli.main import bench_app
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.presenting.dcp_view import results_as_json, show_results
from fastserial.bench.studies import dcp as study
from fastserial.bench.studies import dcp_worker
from fastserial.bench.studies.dcp_balance import balances
from fastserial.bench.studies.dcp_plan import (
    MIXED,
    PLANNED,
    SMALL,
    STOCK,
    Balance,
    DcpBench,
    DcpResult,
    DcpRow,
    fio_name,
)
from fastserial.bench.subjects import fio

OURS = ['fastserial, "dcp"', 'fastserial, "packed"']


def test_all_rows(tmp_path: Path) -> None:
    sizes = {"nbytes": 12 << 20, "tensors": 20, "small": 30, "planned": 40}
    cases = (MIXED, SMALL, PLANNED)
    bench = DcpBench(str(tmp_path), cases, ranks=(2,), runs=1, pause=0, with_fio=False, **sizes)
    found = study.run_dcp(bench, lambda text: None)
    rows: dict[str, dict[str, DcpRow]] = {}
    for row in found.rows:
        assert row.problem is None, row
        assert len(row.saves) == len(row.loads) == 1
        assert row.ranks == 2
        rows.setdefault(row.case, {})[row.name] = row
    mixed = rows.pop(MIXED)
    stocks = ["2 threads", "CRC off", "2 threads, CRC off", "copies ahead"]
    assert list(mixed) == [STOCK, *(f"{STOCK}, {text}" for text in stocks), *OURS]
    assert all(row.nbytes > 11 << 20 for row in mixed.values())
    first = [f"{name}, first save" for name in OURS]
    planned = rows.pop(PLANNED)
    assert set(planned) - {f"{STOCK}, plan caching"} == {STOCK, first[0], OURS[0]}
    assert [set(some) for some in rows.values()] == [{STOCK, *OURS, *first}]
    for case in (mixed, planned, *rows.values()):
        for row in case.values():
            assert row.equal is True, row
            assert 0 < row.plans[0] < row.saves[0]
    assert found.right
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not fio.installed(), reason="fio is not installed")
def test_fio_writes_and_reads_with_as_many_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "_BLOCKS", (1 << 20,))
    monkeypatch.setattr(fio, "_ENGINES", ("libaio",))
    found = dcp_worker._best(DcpBench(str(tmp_path), nbytes=8 << 20, pause=0), 2)
    assert found.name == fio_name(2)
    path = tmp_path / "file"
    assert fio.run_fio(found.write, path, 8 << 20, 2).nbytes == 8 << 20 == path.stat().st_size
    assert fio.read_file(found.read, path, 2).nbytes == 8 << 20


def test_a_state_that_comes_back_wrong_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"name": STOCK, "case": MIXED, "ranks": 1, "saves": [1], "loads": [1], "equal": False}
    told: list[dict[str, Any]] = []

    def run_ranks(module: str, argument: str, world: int) -> str:
        told.append(json.loads(argument))
        return json.dumps([{**row, "ranks": world}])

    monkeypatch.setattr(study, "run_ranks", run_ranks)
    out = tmp_path / "out.json"
    command = ["dcp", "--folder", str(tmp_path), "--ranks", "1", "--ranks", "3", "--size", "1MiB"]
    command += ["--case", "mixed", "--runs", "2", "--json", str(out)]
    done = CliRunner().invoke(bench_app, command)
    assert done.exit_code == 1, (done.output, done.exception)
    assert "WRONG" in done.output
    assert [row["ranks"] for row in json.loads(out.read_text())["rows"]] == [1, 3]
    assert [(bench["cases"], bench["nbytes"], bench["runs"]) for bench in told] == [
        (["mixed"], 1 << 20, 2)
    ] * 2


def test_ratios_are_of_one_round_and_of_as_many_ranks() -> None:
    rows = [
        DcpRow(fio_name(2), MIXED, 2, [1.0, 2.0], [], [0.5, 0.5], 1000),
        DcpRow(STOCK, MIXED, 2, [4.0, 4.0], [0.1, 0.1], [1.0, 1.0], 1000, equal=True),
        DcpRow(OURS[0], MIXED, 2, [2.0, 2.0], [0.1, 0.1], [0.5, 1.0], 2000, 1 << 20, None, True),
        DcpRow(OURS[1], MIXED, 2, problem="RuntimeError: [no] way"),
        DcpRow(STOCK, PLANNED, 2, [4.0], [3.0], [1.0], 1000, equal=True),
        DcpRow(OURS[0], PLANNED, 2, [2.0], [0.5], [2.0], 1000, equal=True),
    ]
    bench = DcpBench(".", runs=2)
    result = DcpResult(rows, [Balance("one", [4 << 20, 0], [2 << 20, 2 << 20])])
    text = io.StringIO()
    show_results(bench, result, Console(file=text, width=250))
    ours, planned = (line for line in text.getvalue().splitlines() if OURS[0] in line)
    # x fio of the save, twice as many bytes; x DCP; the same of the load
    for ratio in ("1.50 (1.00–2.00)", "2.00 (2.00–2.00)", "1.50 (1.00–2.00)", "1MiB / –"):
        assert ratio in ours
    assert "6.00 (6.00–6.00)" in planned
    assert "[no] way" in text.getvalue()
    (line,) = [line for line in text.getvalue().splitlines() if "one" in line.split()]
    assert "4 / 0" in line
    assert "2.000" in line
    assert "1.000" in line
    told = results_as_json(bench, result)
    assert told["rows"][0]["saves"] == [1.0, 2.0]
    assert told["balance"][0]["ours"] == [2 << 20, 2 << 20]


def test_each_rank_writes_as_much_as_the_others() -> None:
    found = balances()
    assert len(found) == 4
    for one in found:
        assert sum(one.stock) == sum(one.ours) > 900 << 20, one
        assert max(one.ours) * 4 <= 1.05 * sum(one.ours), one
    assert max(found[2].stock) == sum(found[2].stock), "stock cuts a tensor"


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    command = ["dcp", "--folder", str(tmp_path), "--size", "1000TB"]
    done = CliRunner().invoke(bench_app, command)
    assert isinstance(done.exception, BenchError)
