"""The parts of the benchmarks: what they compare, how they count, what they leave."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fastserial
from fastserial.bench.measuring import ranks, rotation
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import different_tensors, digest
from fastserial.bench.measuring.measure import Sample, measure
from fastserial.bench.measuring.pages import reserved_huge_bytes, small_pages
from fastserial.bench.measuring.rotation import Measured, Plan, rotate
from fastserial.bench.measuring.rows import DURABLE, LOOSE, Row
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.summary import Spread, paired, summarize, unsteadiness
from fastserial.bench.measuring.units import parse_bytes
from fastserial.bench.presenting.deepspeed_view import results_as_json, show_results
from fastserial.bench.presenting.save_view import fio_line, table_of
from fastserial.bench.studies import comparison
from fastserial.bench.studies.deepspeed_plan import DeepSpeedBench, RowResult
from fastserial.bench.studies.startup import measure_startup
from fastserial.bench.subjects import fio, payload
from fastserial.bench.subjects.fio import FioVariant
from fastserial.bench.subjects.payload import mixed_state, tensor_sizes
from fastserial.bench.subjects.saving import Format
from fastserial.bench.subjects.torch_rows import fast_row, stock_row, torch_rows
from fastserial.engines.null import NullEngine
from fastserial.errors import ConfigError

CALM = Plan(runs=2, warmups=1, pause=0.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "settle", lambda pause: None)


def sample(seconds: float, nbytes: int = 1000) -> Sample:
    return Sample(nbytes, seconds, seconds / 2, 100)


# --- data -------------------------------------------------------------------------------------


def test_tensor_sizes() -> None:
    sizes = tensor_sizes(1 << 30, 300)
    assert len(sizes) == 300
    assert sum(sizes) == pytest.approx(1 << 30, rel=1e-3)
    assert max(sizes) > 1000 * min(sizes)
    assert sizes == tensor_sizes(1 << 30, 300)
    assert min(tensor_sizes(100, 300)) > 0


def test_state_is_the_same_every_time() -> None:
    one, two = mixed_state(1 << 20, 20), mixed_state(1 << 20, 20)
    assert different_tensors(one, two) == []
    assert len({tensor.dtype for tensor in one.values()}) > 2
    assert different_tensors(one, mixed_state(1 << 20, 20, seed=1))


def test_state_that_does_not_fit() -> None:
    with pytest.raises(BenchError, match="memory"):
        mixed_state(1 << 60, 1)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("3GiB", 3 << 30), ("3GB", 3 * 10**9), ("1.5kb", 1500), ("7", 7)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "xGB", "infGB", "1e999", "1 parsec"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


# --- comparing --------------------------------------------------------------------------------


def test_digest(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for left, right in ((b"abc", b"abc"), (b"abc", b"abd"), (b"ab", b"abc")):
        one.write_bytes(left)
        two.write_bytes(right)
        assert (digest(one) == digest(two)) is (left == right)


def test_different_tensors() -> None:
    nan = torch.tensor([float("nan")])
    assert different_tensors({"a": nan, "b": nan}, {"a": nan.clone(), "b": nan.clone()}) == []
    assert different_tensors({"a": nan}, {"b": nan}) == ["a", "b"]
    assert different_tensors({"a": nan}, {"a": nan.double()}) == ["a"]
    assert different_tensors({"a": torch.zeros(())}, {"a": torch.zeros(1)}) == ["a"]


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


def test_scratch_is_removed(tmp_path: Path) -> None:
    def interrupted() -> None:
        with scratch(tmp_path, 0) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_bytes(b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_scratch_needs_room(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="free"), scratch(tmp_path, 1 << 60):
        pass
    with pytest.raises(BenchError, match="create it"), scratch(tmp_path / "missing", 0):
        pass


def writer(name: str, order: list[str], data: bytes, **more: str) -> Row:
    def run(path: Path) -> Sample:
        order.append(f"{name} {path.suffix}")
        path.write_bytes(data)
        return sample(len(order))

    return Row(name, DURABLE, run, **more)  # type: ignore[arg-type]


def test_rows_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    rows = [
        writer("stock", order, b"abc"),
        writer("good", order, b"abc", same_bytes_as="stock", stock="stock"),
        writer("bad", order, b"abd", same_bytes_as="stock"),
    ]
    measured = rotate(rows, tmp_path, CALM)
    assert [word.split()[0] for word in order] == ["stock", "good", "bad"] * 3
    assert len(set(order)) == 9  # a new name each time
    assert [len(one.samples) for one in measured] == [2, 2, 2]
    assert [one.identical for one in measured] == [None, True, False]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_torch_rows(tmp_path: Path, container: str) -> None:
    state = {"a": torch.arange(100_000), "b": torch.zeros(3)}
    before = torch.serialization._save
    rows = [
        stock_row(state, container),  # type: ignore[arg-type]
        stock_row(state, container, crc=False),  # type: ignore[arg-type]
        stock_row(state, container, overwrites=True),  # type: ignore[arg-type]
        fast_row(state, container),  # type: ignore[arg-type]
        fast_row(state, container, huge_pages=False),  # type: ignore[arg-type]
        fast_row(state, container, overwrites=True),  # type: ignore[arg-type]
        fast_row(state, container, durable=False),  # type: ignore[arg-type]
        fast_row(state, container, durable=False, engine=NullEngine),  # type: ignore[arg-type]
    ]
    measured = rotate(rows, tmp_path, CALM)
    assert [one.identical for one in measured] == [None, None, None, True, True, True, True, None]
    assert len({row.name for row in rows}) == len(rows)
    assert all(one.samples[0].nbytes >= 800_000 for one in measured)
    assert torch.serialization._save is before
    assert torch.serialization.get_crc32_options()
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_not_ours_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastserial, "last_save_report", lambda: None)
    with pytest.raises(BenchError, match="its own way"):
        fast_row({}, "zip").run(tmp_path / "a.pt")


# --- counting ---------------------------------------------------------------------------------


def test_ratios_are_of_one_round() -> None:
    mine, theirs = [sample(1), sample(10), sample(2)], [sample(2), sample(20), sample(8)]
    assert paired(mine, theirs) == Spread(2, 2, 4)


def test_summary() -> None:
    def row(name: str, group: str = DURABLE, stock: str | None = None) -> Row:
        return Row(name, group, lambda path: sample(1), stock)

    rows = [row("fio a"), row("fio b"), row("stock"), row("fast", DURABLE, "stock")]
    times = [[4.0, 4.0], [1.0, 2.0], [8.0, 8.0], [2.0, 2.0]]
    measured = [Measured(row, [sample(t) for t in ts]) for row, ts in zip(rows, times, strict=True)]
    measured.append(Measured(row("loose", LOOSE, "absent"), [sample(1), sample(1)]))
    lines = {line.name: line for line in summarize(measured, ["fio a", "fio b"])}
    fast = lines["fast"]
    assert fast.to_fio == Spread(0.75, 0.5, 1.0)  # over fio b, the faster one
    assert fast.to_stock == Spread(4, 4, 4)
    assert lines["stock"].to_stock == Spread(1, 1, 1)
    assert lines["loose"].to_fio is None
    assert lines["loose"].to_stock is None
    assert fast.cpu_per_gb.median == pytest.approx(1e6)
    assert fast.extra_bytes == 100
    assert "fio=0.75x, stock=4.00x" in fio_line(fast)


@pytest.mark.parametrize(("slowest", "found"), [(1.5, None), (3.0, 3.0)])
def test_unsteady_runs_are_told(slowest: float, found: float | None) -> None:
    row = Row("stock", DURABLE, lambda path: sample(1))
    calm = Measured(row, [sample(1), sample(1)])
    varied = [Measured(row, [sample(1), sample(slowest)]) for _ in range(3)]
    lines = summarize([calm, *varied])
    assert unsteadiness(lines) == (None if found is None else pytest.approx(found))


def test_startup() -> None:
    found = measure_startup(1, lambda text: None)
    assert 0 < found.added.median < found.torch.median * 5
    assert found.ratio.median == pytest.approx(found.added.median / found.torch.median)


# --- fio --------------------------------------------------------------------------------------

WORDS = {
    "error": 0,
    "write": {
        "io_bytes": 8 << 20,
        "runtime": 40,
        "clat_ns": {"N": 8, "mean": 1e6, "max": 3_000_000, "percentile": {"50.000000": 900_000}},
    },
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
    fake_fio(tmp_path, monkeypatch, f"echo \"$@\" > {log}\necho 'fio: note'\necho '{answer}'")
    found = fio.run_fio(FioVariant("libaio", 1 << 20, True), tmp_path / "a:b", 8_000_000)
    assert fio.installed()
    assert found.seconds == pytest.approx(0.04)
    assert found.nbytes == 8 << 20
    assert found.cpu_seconds == pytest.approx(0.01)
    assert found.latency is not None
    assert found.latency.p50 == pytest.approx(0.0009)
    asked = log.read_text()
    for word in ("--end_fsync=1", "--direct=1", "--fallocate=native", "a\\:b", "--size=8388608"):
        assert word in asked


def test_fio_with_fresh_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    fake_fio(tmp_path, monkeypatch, f"echo \"$@\" > {log}\necho '{json.dumps({'jobs': [WORDS]})}'")
    variant = fio.fresh_variant(FioVariant("libaio", 1 << 20, True, huge=True))
    assert str(variant) == "fio libaio 1MiB, fresh data, prealloc"
    fio.run_fio(variant, tmp_path / "file", 100 << 20)
    asked = log.read_text()
    for word in ("--iodepth=100", "--iomem=malloc", "--size=104857600"):
        assert word in asked


@pytest.mark.parametrize("script", ["echo no engine >&2; exit 1", "exit 0", "echo '{}'"])
def test_fio_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_fio(tmp_path, monkeypatch, script)
    with pytest.raises(BenchError, match="libaio"):
        fio.run_fio(FioVariant("libaio", 1 << 20, False), tmp_path / "file", 1)


def test_best_of_fio() -> None:
    def run(variant: FioVariant) -> Sample:
        if variant.engine == "io_uring":
            raise BenchError("no io_uring here")
        return sample(variant.block if variant.preallocate else 1 / variant.block)

    best = fio.best_variants(run)
    assert {(v.engine, v.block, v.preallocate) for v in best} == {
        ("libaio", 1 << 20, True),
        ("libaio", 8 << 20, False),
    }
    assert all(variant.direct for variant in best)


def test_fio_on_huge_pages() -> None:
    found = fio.best_variants(lambda variant: sample(1), huge=True)
    assert all(variant.huge and variant.direct for variant in found)
    assert "huge pages" in str(found[0])

    def none_reserved(variant: FioVariant) -> Sample:
        if variant.huge:
            raise BenchError("Cannot allocate memory")
        return sample(1)

    found = fio.best_variants(none_reserved, huge=True)
    assert not any(variant.huge for variant in found)
    assert not any(v.huge for v in fio.best_variants(lambda variant: sample(1)))


def test_small_pages_are_for_the_block_only() -> None:
    def disabled() -> bool:
        status = Path("/proc/self/status").read_text()
        return "THP_enabled:\t0" in status

    before = disabled()
    with small_pages():
        assert disabled()
    assert disabled() is before
    assert reserved_huge_bytes() >= 0


def test_like_is_compared_with_like() -> None:
    formats: tuple[Format, ...] = ("zip", "legacy")
    plain = [row.name for row in torch_rows({}, formats)]
    beside = [row.name for row in torch_rows({}, formats, small_pages=True)]
    added = [name for name in beside if name not in plain]
    assert added == ["fastserial zip, small pages", "fastserial legacy, small pages"]


def test_fio_without_direct_io() -> None:
    def run(variant: FioVariant) -> Sample:
        if variant.direct:
            raise BenchError("Invalid argument")
        return sample(1)

    assert not any(variant.direct for variant in fio.best_variants(run))

    def fail(variant: FioVariant) -> Sample:
        raise BenchError("nothing works")

    with pytest.raises(BenchError, match="nothing works"):
        fio.best_variants(fail)


@pytest.mark.parametrize("roomy", [True, False])
def test_fresh_data_stands_beside_the_yardstick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roomy: bool
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    touch = 'for word; do case $word in --filename=*) : > "${word#--filename=}";; esac; done'
    fake_fio(tmp_path, monkeypatch, f"{touch}\necho '{json.dumps({'jobs': [WORDS]})}'")
    monkeypatch.setattr(comparison, "settle", lambda pause: None)
    if not roomy:
        monkeypatch.setattr(payload, "meminfo", lambda: {"MemAvailable": 1 << 20})
    found = comparison.compare(lambda small_pages: [], "nothing", 8 << 20, folder, CALM)
    fresh = [line for line in found.lines if "fresh data" in line.name]
    assert [line.to_fio for line in fresh] == ([Spread(1.0, 1.0, 1.0)] if roomy else [])
    assert len(found.lines) == 2 + len(fresh)
    assert list(found.missing) == ([] if roomy else ["fio, fresh data"])
    assert list(folder.iterdir()) == []


# --- DeepSpeed's benchmark: the parts that need no DeepSpeed ------------------------------------


def test_one_rank_that_fails_ends_the_run() -> None:
    programs = ("import time; time.sleep(600)", "raise SystemExit(3)")
    running = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        assert ranks._first_failure(running) == (1, 3)
        assert running[0].poll() is None
    finally:
        running[0].kill()
        running[0].wait()
    done = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
    assert ranks._first_failure(done) is None


def test_deepspeed_s_ratios_are_of_one_round(tmp_path: Path) -> None:
    bench = DeepSpeedBench("gpt2", str(tmp_path), runs=3)
    rows = [
        RowResult("stock", [1.0, 2.0, 4.0], 1000, 2),
        RowResult("ours", [0.5, 0.5, 4.0], 1000, 2, identical=True),
        RowResult("theirs", [1.0], 1000, problem="[no] room"),
    ]
    console = Console(width=150, record=True, file=io.StringIO())
    show_results(bench, rows, console)
    text = console.export_text()
    assert "2.00 (1.00–4.00)" in text
    assert "[no] room" in text
    found = results_as_json(bench, rows)
    assert [row["seconds"] for row in found["rows"]] == [row.seconds for row in rows]
    assert found["machine"]["cores"] > 0


def test_a_narrow_terminal_cuts_no_number_off() -> None:
    table = table_of("what", *(f"column {number}" for number in range(8)))
    cells = [f"{number}{number}1,234.56" for number in range(8)]
    table.add_row("a row", *cells)
    console = Console(width=60, file=io.StringIO())
    console.print(table)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said
    rows = [line.split("│")[2:10] for line in said.splitlines() if line.startswith("│")]
    assert ["".join(parts).replace(" ", "") for parts in zip(*rows, strict=True)] == cells
