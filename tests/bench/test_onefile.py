"""`fastserial bench onefile`: real ranks, a small state."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fastserial.bench.cli.main import bench_app
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.ranks import run_ranks
from fastserial.bench.presenting.onefile_view import results_as_json, show_results
from fastserial.bench.studies.onefile_plan import GATHER, OneFileBench, RowResult, fio_name
from fastserial.bench.subjects import fio


def test_all_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    folder = tmp_path / "folder"
    folder.mkdir()
    command = ["onefile", "--folder", str(folder), "--ranks", "2", "--size", "12MiB"]
    command += ["--tensors", "20", "--runs", "1", "--json", str(out)]
    done = CliRunner().invoke(bench_app, command)
    assert done.exit_code == 0, (done.output, done.exception)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    names = [GATHER, "DCP save + consolidation", "fastserial, 1 writer", "fastserial, 2 writers"]
    if fio.installed():
        names = ["fio, 1 job", "fio, 2 jobs", *names]
    assert list(rows) == names
    for name, row in rows.items():
        assert row["problem"] is None, row
        assert len(row["seconds"]) == 1
        assert row["nbytes"] > 11 << 20, name
    for count, name in ((1, "fastserial, 1 writer"), (2, "fastserial, 2 writers")):
        row = rows[name]
        assert row["identical"] is True
        assert row["yardstick"] == (fio_name(count) if fio.installed() else None)
        (ranks,) = row["parts"]
        assert [part["rank"] for part in ranks] == [0, 1]
        assert [part["bytes"] > 0 for part in ranks] == [True, count > 1]
        assert all("write" in part["phases"] for part in ranks)
    assert list(folder.iterdir()) == []


def test_ratios_are_of_one_round_and_of_as_many_writers() -> None:
    bench = OneFileBench(".", 1000, 1, 2, (1, 2), runs=2)
    parts = [[{"rank": 0, "bytes": 7, "sent_bytes": 0, "received_bytes": 0, "phases": {"plan": 1}}]]
    rows = [
        RowResult("fio, 1 job", [1.0, 2.0], 1000),
        RowResult("fio, 2 jobs", [0.5, 1.0], 1000),
        RowResult(GATHER, [4.0, 6.0], 1000, yardstick="fio, 1 job"),
        RowResult("fastserial, 2 writers", [1.0, 2.0], 1000, 0, "fio, 2 jobs", parts=parts * 2),
        RowResult("DCP save + consolidation", problem="RuntimeError: [no] way"),
    ]
    text = io.StringIO()
    show_results(bench, rows, Console(file=text, width=200))
    (line,) = [line for line in text.getvalue().splitlines() if "2 writers " in line]
    assert "0.50 (0.50–0.50)" in line
    assert "3.50 (3.00–4.00)" in line
    assert "[no] way" in text.getvalue()
    assert "rank 0" in text.getvalue()
    assert results_as_json(bench, rows)["rows"][0]["seconds"] == [1.0, 2.0]


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    command = ["onefile", "--folder", str(tmp_path), "--size", "1000TB"]
    done = CliRunner().invoke(bench_app, command)
    assert isinstance(done.exception, BenchError)
    with pytest.raises(BenchError, match="ended with 1"):
        run_ranks("fastserial.bench.studies.onefile_worker", "no json", 2)
