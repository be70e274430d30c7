"""`fastserial bench sweep`: which points, resumed where it stopped, what is shown."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastserial.bench.cli.sweep import _grid
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.presenting import sweep_view
from fastserial.bench.presenting.sweep_view import best_settings, cells, plot
from fastserial.bench.studies import sweep
from fastserial.bench.studies.sweep import Grid, Sweep, points, run_sweep
from fastserial.bench.studies.sweep_file import Point, Result, SweepFile
from fastserial.cli.main import app
from fastserial.config import current
from fastserial.errors import EngineUnavailableError

KIB, MIB = 1 << 10, 1 << 20
GRID = Grid((64 * KIB, MIB), (1, 4), (1, 4), ("threads",), ("cpu",), ("write", "read"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "settle", lambda pause: None)


def plan(folder: Path, **more: Any) -> Sweep:
    folder.mkdir(exist_ok=True)
    return Sweep(folder, **{"nbytes": 2 * MIB + 5, "grid": GRID, "runs": 2, "pause": 0, **more})


def result(point: Point, run: int = 0, ratio: float = 1.0, **more: Any) -> Result:
    values: dict[str, Any] = {
        "seconds": 1.0, "bandwidth": ratio * 1e9, "cpu_seconds": 0.1,
        "p50": 0.001, "p95": 0.002, "p99": 0.003,
        "fallback": "", "error": "", "when": "2026-01-01T00:00:00+00:00", "fastserial": "0.1.0",
    }  # fmt: skip
    return Result(run=run, point=point, ratio=ratio, **{**values, **more})


def point(op: str = "write", size: int = MIB, depth: int = 4, threads: int = 4) -> Point:
    return Point(op, "cpu", "threads", size, depth, threads)


class FakeRunner:
    """Makes results without I/O, until it is told to fail."""

    made: list[tuple[Point, int]]
    limit = 10**9

    def __init__(self, folder: Path, plan: Sweep) -> None:
        pass

    def result(self, point: Point, run: int) -> Result:
        if len(self.made) >= self.limit:
            raise KeyboardInterrupt
        self.made.append((point, run))
        return result(point, run)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    class Fresh(FakeRunner):
        made: list[tuple[Point, int]] = []  # noqa: RUF012

    monkeypatch.setattr(sweep, "_Runner", Fresh)
    return Fresh


# --- points and order -------------------------------------------------------------------------


def test_points_make_sense(tmp_path: Path) -> None:
    found = points(plan(tmp_path, most_memory=4 * MIB))
    assert len(found) == len(set(found)) == 2 * 2 * 3
    assert all(one.threads <= one.queue_depth for one in found)
    assert len(points(plan(tmp_path, most_memory=MIB))) == 2 * (3 + 1)
    with pytest.raises(BenchError, match="no combination"):
        run_sweep(plan(tmp_path, most_memory=0), tmp_path / "a.csv")


def test_runs_follow_each_other(tmp_path: Path, fake: type[FakeRunner]) -> None:
    whole = plan(tmp_path / "disk", runs=3)
    run_sweep(whole, tmp_path / "a.csv")
    count = len(points(whole))
    assert [run for _, run in fake.made] == [0] * count + [1] * count + [2] * count
    for run in range(3):
        of_run = [point for point, its_run in fake.made if its_run == run]
        assert set(of_run) == set(points(whole))
    assert fake.made[:count] != [(point, 0) for point, _ in fake.made[count : 2 * count]]


# --- the file ---------------------------------------------------------------------------------


def test_results_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    kept = [
        result(point(), 0, 1.25, fallback='direct I/O, "refused"'),
        result(point("read"), 3, 0.5, error="no\nmemory"),
    ]
    with SweepFile(path, "disk", 7) as file:
        for one in kept:
            file.add(one)
    with SweepFile(path, "disk", 7) as file:
        assert file.results[0] == kept[0]
        assert file.results[1].error == "no memory"
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    assert rows[0]["ratio_to_default"] == "1.2500"
    assert rows[0]["lat_p50_us"] == "1000.0"


def test_goes_on_where_it_was_stopped(tmp_path: Path, fake: type[FakeRunner]) -> None:
    path, whole = tmp_path / "a.csv", plan(tmp_path / "disk")
    fake.limit = 5
    with pytest.raises(KeyboardInterrupt):
        run_sweep(whole, path)
    assert len(path.read_text().splitlines()) == 1 + 5
    path.write_text(path.read_text()[:-20])  # the last line was cut
    fake.limit = 10**9
    told: list[tuple[int, int]] = []
    results = run_sweep(whole, path, lambda done, total, text: told.append((done, total)))
    count = 2 * len(points(whole))
    assert len(fake.made) == count + 1
    assert told[0] == (4, count)
    assert told[-1] == (count, count)
    assert len({(one.point, one.run) for one in results}) == len(results) == count
    assert run_sweep(whole, path) == results
    assert len(fake.made) == count + 1
    assert list((tmp_path / "disk").iterdir()) == []


def test_more_runs_and_points_are_added(tmp_path: Path, fake: type[FakeRunner]) -> None:
    path = tmp_path / "a.csv"
    run_sweep(plan(tmp_path / "disk", runs=1), path)
    fake.made.clear()
    run_sweep(plan(tmp_path / "disk", runs=2), path)
    assert {run for _, run in fake.made} == {1}


def test_files_of_something_else_are_left_alone(tmp_path: Path, fake: type[FakeRunner]) -> None:
    path = tmp_path / "a.csv"
    for text in ("name,value\na,1\n", "no line end", "name\nno line end"):
        path.write_text(text)
        with pytest.raises(BenchError, match="something else"):
            run_sweep(plan(tmp_path / "disk"), path)
        assert path.read_text() == text
    path.unlink()
    run_sweep(plan(tmp_path / "disk"), path)
    before = path.read_text()
    with pytest.raises(BenchError, match="give another --csv"):
        run_sweep(plan(tmp_path / "disk", nbytes=MIB), path)
    with pytest.raises(BenchError, match=f"in {tmp_path / 'disk'}, not of .*{tmp_path / 'other'}"):
        run_sweep(plan(tmp_path / "other"), path)
    path.write_text(before.replace(",write,cpu,threads,", ",write,cpu,threads,x", 1))
    with pytest.raises(BenchError, match="line 2"):
        run_sweep(plan(tmp_path / "disk"), path)


# --- real transfers ---------------------------------------------------------------------------


def test_real_sweep(tmp_path: Path) -> None:
    whole = plan(tmp_path / "disk", runs=1)
    try:
        results = run_sweep(whole, tmp_path / "a.csv")
    except BenchError as error:
        if "page cache" in str(error):
            pytest.skip(f"no cold reads here: {error}")
        raise
    assert {one.point for one in results} == set(points(whole))
    assert all(one.bandwidth > 0 and one.ratio > 0 and not one.error for one in results)
    assert list((tmp_path / "disk").iterdir()) == []


def test_wrong_bytes_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastserial.saving.writer import FastFileWriter

    close = FastFileWriter.close

    def spoil(self: FastFileWriter) -> None:
        close(self)
        with open(self.name, "r+b") as file:
            file.seek(1000)
            byte = file.read(1)[0]
            file.seek(1000)
            file.write(bytes([byte ^ 1]))

    monkeypatch.setattr(FastFileWriter, "close", spoil)
    monkeypatch.setattr(sweep, "chill", lambda paths: None)
    with pytest.raises(BenchError, match="not what was written"):
        run_sweep(plan(tmp_path / "disk"), tmp_path / "a.csv")
    assert list((tmp_path / "disk").iterdir()) == []


def runner(folder: Path, monkeypatch: pytest.MonkeyPatch, speeds: list[float]) -> sweep._Runner:
    """Return one whose transfers have these bandwidths, one after the other."""
    monkeypatch.setattr(sweep._Runner, "_write", lambda *_: None)
    made = sweep._Runner(folder, plan(folder))
    left = iter(speeds)
    monkeypatch.setattr(sweep._Runner, "_sample", lambda *_: Sample(1000, 1000 / next(left), 0.0))
    return made


def test_ratio_is_to_the_last_runs_of_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a warm-up, three defaults, four results, another default, a result
    speeds = [1.0, 10.0, 20.0, 90.0, 20.0, 40.0, 10.0, 20.0, 80.0, 160.0]
    made = runner(tmp_path / "disk", monkeypatch, speeds)
    ratios = [made.result(point(), 0).ratio for _ in range(5)]
    assert ratios == pytest.approx([1, 2, 0.5, 1, 2])  # of 20, then of 80


def test_an_engine_that_cannot_run_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner(tmp_path / "disk", monkeypatch, [1.0] * 4)

    def sample(self: sweep._Runner, one: Point) -> Sample:
        if one.engine == "picky":
            raise EngineUnavailableError("no memory may be locked")
        return Sample(1000, 1.0, 0.0)

    monkeypatch.setattr(sweep._Runner, "_sample", sample)
    found = made.result(Point("write", "cpu", "picky", MIB, 4, 4), 0)
    assert found.error == "no memory may be locked"
    assert found.ratio == 0


@pytest.mark.parametrize(
    ("word", "why"), [("cpu_async_gpu", "CUDA"), ("gds", "cuFile"), ("gpu_batch", "cuFile")]
)
def test_transfers_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    grid = Grid((MIB,), (1,), (1,), ("threads",), (word,), ("write",))
    with pytest.raises(BenchError, match=f"transfer '{word}': .*{why}"):
        run_sweep(plan(tmp_path / "disk", grid=grid), tmp_path / "a.csv")


def test_numbers_of_gdsio(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "1MiB", "1", "1", "threads"
    assert _grid(*sizes, "1, 3,cpu_gpu,2", "write").transfers == ("cpu", "cpu_async_gpu", "cpu_gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _grid(*sizes, "", "write").transfers == ("cpu",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    all_of_them = ("cpu", "cpu_gpu", "cpu_async_gpu", "cpu_cached_gpu")
    assert _grid(*sizes, "", "write").transfers == all_of_them


# --- what is shown ----------------------------------------------------------------------------


def test_cells_are_medians_with_the_best_first() -> None:
    slow, fast = point(depth=4), point(depth=6)
    found = cells(
        [result(slow, run, ratio) for run, ratio in enumerate((0.5, 0.7, 3.0))]
        + [result(fast, run, ratio) for run, ratio in enumerate((1.1, 1.2, 1.3))]
    )
    assert [cell.point for cell in found] == [fast, slow]
    assert found[1].ratio.median == 0.7
    assert found[1].bandwidth.high == 3e9


def test_best_settings_are_variables_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    best = Point("write", "cpu", "threads", 512 * KIB, 8, 4)
    lucky = point(size=4 * MIB)  # the fastest in the median, but not steadily so
    to_device = Point("read", "cpu_async_gpu", "threads", MIB + 4 * KIB, 4, 4)
    found = cells(
        [result(best, run, ratio) for run, ratio in enumerate((1.04, 1.1, 1.2))]
        + [result(lucky, run, ratio) for run, ratio in enumerate((0.9, 1.5, 1.6))]
        + [result(point("read"), run, 1.02) for run in range(3)]
        + [result(to_device, 0, 2.0)]
    )
    nothing, read, to_gpu, write, variables = best_settings(found)
    assert nothing == "# read, cpu: no setting is clearly faster than the defaults"
    assert read == "# read, cpu_async_gpu: 2.00 × the defaults"
    assert to_gpu.endswith(
        "FASTSERIAL_THREADS=4 FASTSERIAL_ENGINE=threads FASTSERIAL_TRANSFER=cpu_async_gpu"
    )
    assert "FASTSERIAL_BLOCK_SIZE=1028KiB" in to_gpu
    assert write == "# write, cpu: 1.10 × the defaults"
    for word in variables.split():
        monkeypatch.setenv(*word.split("=", 1))
    config = current()
    chosen = (config.engine, config.block_size, config.queue_depth, config.threads)
    assert chosen == (best.engine, best.block_size, best.queue_depth, best.threads)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = cells(
        [
            result(point(op, size, depth, 1), 0, ratio)
            for op in ("write", "read")
            for size in (MIB, 2 * MIB)
            for depth, ratio in ((1, 0.5), (4, 2.0))
        ]
        + [result(point(size=MIB, depth=4, threads=4), 0, 3.0)]
        + [result(point(size=4 * MIB), 0, 0.0, error="could not run")]
    )
    path = tmp_path / "map.png"
    plot(found, path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    maps = sweep_view._maps(found)
    assert [one.title for one in maps] == ["read, cpu, threads", "write, cpu, threads"]
    assert maps[1].sizes == [MIB, 2 * MIB]
    assert maps[1].best[MIB, 4].ratio.median == 3.0  # the better number of threads
    with pytest.raises(BenchError, match="map"):
        plot(found, tmp_path / "map.nonsense", "a title")
    with pytest.raises(BenchError, match="nothing"):
        plot([], path, "a title")


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    words = ["bench", "sweep", "--folder", str(tmp_path), "--plot", str(tmp_path / "a.png")]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, BenchError)
    assert "pip install matplotlib" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_refused_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = invoke(tmp_path / "disk", "--plot", str(tmp_path / "out.xyz"))
    assert "end it in" in str(done.exception)
    done = invoke(tmp_path / "disk", "--plot", str(tmp_path / "missing" / "out.png"))
    assert "create it first" in str(done.exception)
    assert not (tmp_path / "a.csv").exists()


# --- the command ------------------------------------------------------------------------------


def invoke(folder: Path, *words: str) -> Any:
    folder.mkdir(exist_ok=True)
    fixed = ["--folder", str(folder), "--csv", str(folder.parent / "a.csv"), "--size", "2MiB"]
    return CliRunner().invoke(app, ["bench", "sweep", *fixed, *words])


def test_command(tmp_path: Path) -> None:
    words = ["--runs", "1", "--block-size", "1MiB,2MiB", "--queue-depth", "6", "--threads", "6"]
    words += ["--engine", "threads"]
    done = invoke(tmp_path / "disk", *words, "--op", "write")
    assert done.exit_code == 0, done.output
    assert "threads (default)" in done.output
    assert "# write, cpu: " in done.output
    assert "2 results in" in done.output
    before = (tmp_path / "a.csv").read_bytes()
    again = invoke(tmp_path / "disk", *words, "--op", "write")
    assert again.exit_code == 0
    assert (tmp_path / "a.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--op", "erase"], "--op: 'erase' is none of write, read"),
        (["--transfer", "gpu"], "--transfer"),
        (["--queue-depth", "four"], "--queue-depth: expected a whole number, not 'four'"),
        (["--threads", "0"], "threads must be from 1 to 1024"),
        (["--block-size", "1000"], "multiple of 4096"),
        (["--engine", "warp"], "no I/O engine 'warp'"),
    ],
)
def test_command_refuses(tmp_path: Path, words: list[str], message: str) -> None:
    done = invoke(tmp_path / "disk", *words)
    assert done.exit_code == 1
    assert message in str(done.exception)
    assert not (tmp_path / "a.csv").exists()
