"""`fastserial bench load`: one checkpoint, every way to load it, and fio, in the same run.

Cold means that no page of the file is in the page cache, warm that all are. Rows run interleaved,
and what each one loaded is compared with what was saved.
"""

from __future__ import annotations

import json
import mmap
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastserial.bench import dcp, fio
from fastserial.bench.errors import BenchError
from fastserial.bench.identical import different_tensors
from fastserial.bench.machine import Machine, this_machine
from fastserial.bench.measure import Sample, measure
from fastserial.bench.payload import check_memory, many_small, mixed_state
from fastserial.bench.readers import Files, Reader, readers
from fastserial.bench.saving import check_torch, stock, write
from fastserial.bench.scratch import scratch
from fastserial.bench.settle import settle
from fastserial.bench.summary import Spread, paired
from fastserial.bench.temperature import chill, warm
from fastserial.bench.units import GB
from fastserial.loadreport import last_load_report
from fastserial.probes import Folder, probe_folder

__all__ = ["LoadBench", "LoadLine", "LoadResult", "run_load"]

_HEADROOM = 256 << 20
_SMALL_COUNT = 20_000
_FIO_BLOCKS = (1 << 20, 4 << 20, 8 << 20)
_FIO_ENGINES = ("io_uring", "libaio")
TEMPERATURES = ("cold", "warm")
STOCK, FIO = "stock zip", "fio read"


@dataclass(frozen=True, slots=True)
class LoadBench:
    """What to measure.

    Attributes:
        folder: where the checkpoint lies; its disk is what is measured.
        nbytes: size of the state dict, about.
        tensors: how many tensors it has.
        runs: rounds that count; one warm-up comes before.
        small: also load 20,000 tensors of 4 KiB.
        peers: also run other packages' loaders, as far as they are installed.
        with_fio: compare with fio.
        pause: seconds of rest between two runs.
    """

    folder: Path
    nbytes: int
    tensors: int = 300
    runs: int = 5
    small: bool = True
    peers: bool = True
    with_fio: bool = True
    pause: float = 0.2


@dataclass(frozen=True, slots=True)
class LoadLine:
    """One row's result; see `fastserial.bench.summary.Line`.

    Attributes:
        temperature: `cold` or `warm`.
        over_bytes: peak of memory beyond the data itself; None where unknown.
        equal: whether what it loaded equals what was saved; None if not compared.
    """

    name: str
    temperature: str
    seconds: Spread
    bandwidth: Spread
    to_fio: Spread | None
    to_stock: Spread | None
    cpu_per_gb: Spread
    over_bytes: int | None
    equal: bool | None
    fallback: str | None
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was measured and where; `missing` says why rows are not there."""

    bench: LoadBench
    machine: Machine
    folder: Folder
    lines: tuple[LoadLine, ...]
    small: tuple[LoadLine, ...]
    missing: dict[str, str]

    @property
    def equal(self) -> bool:
        """Whether everything that was loaded equals what was saved."""
        return all(line.equal is not False for line in (*self.lines, *self.small))


@dataclass(slots=True)
class _Row:
    reader: Reader
    temperature: str
    samples: list[Sample] = field(default_factory=list)
    equal: bool | None = None


def run_load(bench: LoadBench, say: Callable[[str], None] = lambda text: None) -> LoadResult:
    """Run the benchmark; `say` is told what is being done.

    Raises:
        BenchError: too little memory or disk, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
    """
    check_torch()
    check_memory(3 * bench.nbytes)
    with scratch(bench.folder, 4 * bench.nbytes + _HEADROOM) as folder:
        say("making the data")
        state = mixed_state(bench.nbytes, bench.tensors)
        files, missing = _save(state, folder, bench.peers)
        found, absent = readers(files, state)
        missing |= absent
        if not bench.peers:
            found = [reader for reader in found if reader.group == "torch"]
            missing = {}
        yardstick = _yardstick(bench, files.zip, missing, say)
        lines = _measure(found, state, bench, yardstick, say)
        small: list[LoadLine] = []
        if bench.small:
            say("making the small tensors")
            state = many_small(_SMALL_COUNT)
            files, _ = _save(state, folder, False)
            found = [one for one in readers(files, state)[0] if one.paths == (files.zip,)]
            found = [one for one in found if "mmap" not in one.name]
            small = _measure(found, state, bench, None, say)
    return LoadResult(
        bench,
        this_machine(),
        probe_folder(bench.folder),
        tuple(lines),
        tuple(small),
        missing,
    )


def _save(
    state: dict[str, torch.Tensor], folder: Path, peers: bool
) -> tuple[Files, dict[str, str]]:
    """Write the state dict in every container, with the packages that made these formats."""
    paths = folder / "checkpoint.pt", folder / "checkpoint.legacy.pt"
    missing: dict[str, str] = {}
    with stock():
        write(state, paths[0], "zip")
        write(state, paths[1], "legacy")
    safetensors, sharded = folder / "checkpoint.safetensors", folder / "dcp"
    if not peers:
        return Files(*paths, None, None), missing
    try:
        from safetensors.torch import save_file

        save_file(state, safetensors)
    except ImportError:
        missing["safetensors"] = "not installed: pip install 'fastserial[bench]'"
    try:
        dcp.write(state, sharded)
    except (ImportError, RuntimeError) as error:
        missing["DCP"] = str(error)
    found = [path if path.exists() else None for path in (safetensors, sharded)]
    return Files(*paths, *found), missing


# -- running -------------------------------------------------------------------------------------


def _measure(
    found: Sequence[Reader],
    state: dict[str, torch.Tensor],
    bench: LoadBench,
    yardstick: Reader | None,
    say: Callable[[str], None],
) -> list[LoadLine]:
    rows = [_Row(reader, temperature) for temperature in TEMPERATURES for reader in found]
    if yardstick is not None:
        rows.insert(0, _Row(yardstick, "cold"))
    nbytes = sum(tensor.nbytes for tensor in state.values())
    for turn in range(bench.runs + 1):
        label = f"round {turn}/{bench.runs}" if turn else "warm-up"
        for row in rows:
            say(f"{label}: {row.temperature}, {row.reader.name}")
            _run(row, state, nbytes, bench.pause, compare=turn == 0, keep=turn > 0)
    by_name = {(row.reader.name, row.temperature): row.samples for row in rows}
    fio_samples = by_name.get((FIO, "cold"))
    return [
        _line(
            row,
            by_name[STOCK, row.temperature],
            fio_samples if row.temperature == "cold" else None,
            nbytes,
        )
        for row in rows
    ]


def _run(
    row: _Row,
    state: dict[str, torch.Tensor],
    nbytes: int,
    pause: float,
    *,
    compare: bool,
    keep: bool,
) -> None:
    reader = row.reader
    (chill if row.temperature == "cold" else warm)(reader.paths)
    settle(pause)
    _freshen(nbytes)
    given = reader.prepare()
    kept: list[Any] = []
    fallback = latency = None
    with reader.context():
        used = measure(lambda: kept.append(reader.load(given)))
        if reader.name.startswith("fastserial"):
            report = last_load_report()
            if report is not None:
                fallback, latency = report.fallback, report.complete
    if isinstance(kept[0], Sample):  # fio tells itself
        row.samples += [kept[0]] * keep
        return
    if compare:
        row.equal = not different_tensors(state, kept[0])
    # memory that was there before the load (`prepare`) is not in the peak
    extra = used.extra_bytes
    over = None if extra is None else extra - (0 if given is not None else nbytes)
    if keep:
        row.samples.append(Sample(nbytes, used.seconds, used.cpu_seconds, over, latency, fallback))


def _freshen(nbytes: int) -> None:
    """Let as much memory be there for every row.

    A virtual machine gives free memory back to its host, and getting it again costs more than the
    load; which row would pay for that is chance.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, nbytes, flags=flags).close()


def _line(
    row: _Row, stock_samples: list[Sample], fio_samples: list[Sample] | None, nbytes: int
) -> LoadLine:
    samples = row.samples
    over = [sample.extra_bytes for sample in samples if sample.extra_bytes is not None]
    return LoadLine(
        name=row.reader.name,
        temperature=row.temperature,
        seconds=Spread.of(sample.seconds for sample in samples),
        bandwidth=Spread.of(sample.bandwidth for sample in samples),
        to_fio=paired(samples, fio_samples) if fio_samples else None,
        to_stock=paired(samples, stock_samples) if row.reader.name != FIO else None,
        cpu_per_gb=Spread.of(s.cpu_seconds / s.nbytes * GB for s in samples),
        over_bytes=max(over, default=None),
        equal=row.equal,
        fallback=next((sample.fallback for sample in samples if sample.fallback), None),
        samples=tuple(samples),
    )


# -- fio -----------------------------------------------------------------------------------------


def _yardstick(
    bench: LoadBench, path: Path, missing: dict[str, str], say: Callable[[str], None]
) -> Reader | None:
    """Return fio's best variant as a row, or say why there is none."""
    if not bench.with_fio or not fio.installed():
        missing[FIO] = (
            "not installed: apt-get install fio" if bench.with_fio else "switched off (--no-fio)"
        )
        return None
    best: tuple[float, str, int] | None = None
    for engine in _FIO_ENGINES:
        for block in _FIO_BLOCKS:
            say(f"looking for fio's best: {engine}, {block >> 20}MiB")
            try:
                chill((path,))
                bandwidth = _fio_read(path, engine, block).bandwidth
            except BenchError as error:
                missing[FIO] = str(error)
                continue
            best = max(best or (0.0, engine, block), (bandwidth, engine, block))
    if best is None:
        return None
    missing.pop(FIO, None)
    _, engine, block = best
    return Reader(FIO, (path,), lambda _: _fio_read(path, engine, block))  # type: ignore[arg-type, return-value]


def _fio_read(path: Path, engine: str, block: int) -> Sample:
    command = [
        "fio",
        "--name=fastserial-bench",
        f"--filename={str(path).replace(':', chr(92) + ':')}",
        "--rw=read",
        "--readonly",
        f"--size={path.stat().st_size // block * block}",
        f"--bs={block}",
        f"--ioengine={engine}",
        "--iodepth=8",
        "--direct=1",
        "--thread",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        read = job["read"]
        if done.returncode or job["error"] or not read["runtime"]:
            raise ValueError
    except (ValueError, LookupError):
        words = (done.stderr or done.stdout).strip().splitlines()[:3]
        raise BenchError(f"fio failed: {' '.join(words)}") from None
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    latency = fio.latency_of(read["clat_ns"])
    return Sample(read["io_bytes"], read["runtime"] / 1000, cpu, None, latency)
