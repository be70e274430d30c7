"""`fastserial bench sweep`: raw transfers with every combination of settings, as gdsio sweeps.

One storage goes to a new file and is made durable, or comes from a file of which nothing is in the
page cache; no pickle, no container. The defaults are measured again and again in between, and each
result is kept with its ratio to the median of their last runs.
"""

from __future__ import annotations

import datetime
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fastserial import __version__
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.measure import Sample, measure
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.temperature import chill
from fastserial.bench.studies.sweep_file import Point, Result, SweepFile
from fastserial.bench.subjects.payload import check_memory
from fastserial.config import TRANSFERS, Config
from fastserial.engines.gds.memory import missing
from fastserial.errors import EngineUnavailableError
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import ReadExtent, storage_sink
from fastserial.printable import printable
from fastserial.reports import Latency, Transfer
from fastserial.saving.writer import FastFileWriter

__all__ = ["HOST", "OPS", "Grid", "Sweep", "on_devices", "points", "run_sweep"]

OPS = ("write", "read")
HOST = "cpu"  # the transfer type that has no device in it
_FRESH = 4  # results until the defaults are measured again
_LAST = 3  # measurements of the defaults whose median results are compared with
_COPIES = 2
_HEADROOM = 64 << 20


@dataclass(frozen=True, slots=True)
class Grid:
    """The values to combine; see `fastserial.bench.studies.sweep_file.Point`."""

    block_sizes: tuple[int, ...]
    queue_depths: tuple[int, ...]
    threads: tuple[int, ...]
    engines: tuple[str, ...]
    transfers: tuple[str, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to measure: `nbytes` per transfer, every point `runs` times.

    Attributes:
        most_memory: points whose blocks take more bytes of memory are left out.
        pause: seconds of rest before each transfer.
    """

    folder: Path
    nbytes: int
    grid: Grid
    runs: int = 3
    most_memory: int = 256 << 20
    pause: float = 0.05


def on_devices() -> tuple[str, ...]:
    """Return the transfer types with a device that can be had on this machine."""
    return tuple(word for word in TRANSFERS if word != HOST and missing(word) is None)


def points(sweep: Sweep) -> list[Point]:
    """Return the points of a sweep; threads that would have no block are left out."""
    grid = sweep.grid
    combined = itertools.product(
        grid.ops, grid.transfers, grid.engines, grid.block_sizes, grid.queue_depths, grid.threads
    )
    return [
        point
        for point in itertools.starmap(Point, combined)
        if point.threads <= point.queue_depth
        and point.block_size * point.queue_depth <= sweep.most_memory
    ]


def run_sweep(
    sweep: Sweep,
    file: Path,
    on_progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> list[Result]:
    """Measure what the file does not hold yet, add it there at once, and return all results.

    Args:
        file: CSV; made if it is not there.
        on_progress: receives the number of results, that of all to come, and what is next.

    Raises:
        BenchError: too little memory or disk; the file is of another sweep; what was read is not
            what was written; a transfer type cannot be had here.
        WriteError: a write failed.
    """
    wanted = points(sweep)
    if not wanted:
        raise BenchError("no combination is left: each needs threads ≤ queue depth, and memory")
    for word in sweep.grid.transfers:
        why = missing(word)
        if why is None and word != HOST and not torch.cuda.is_available():
            why = "it needs a CUDA device; torch sees none"
        if why is not None:
            raise BenchError(f"transfer {word!r}: {why}")
    check_memory(_COPIES * sweep.nbytes)
    total = len(wanted) * sweep.runs
    where = printable(str(sweep.folder.absolute()))
    with (
        scratch(sweep.folder, _COPIES * sweep.nbytes + _HEADROOM) as place,
        SweepFile(file, where, sweep.nbytes) as kept,
    ):
        done = {(result.point, result.run) for result in kept.results}
        runner: _Runner | None = None
        count = len(done & set(itertools.product(wanted, range(sweep.runs))))
        for run, point in _missing(wanted, sweep.runs, done):
            on_progress(count, total, f"run {run + 1}: {point}")
            runner = runner or _Runner(place, sweep)
            kept.add(runner.result(point, run))
            count += 1
        on_progress(total, total, "done")
        return list(kept.results)


def _missing(
    wanted: Sequence[Point], runs: int, done: set[tuple[Point, int]]
) -> Iterator[tuple[int, Point]]:
    """Yield what is to be done: run by run, so that drift of the machine hits all points alike.

    Within a run and a kind of transfer the order is random, and the same each time.
    """
    for run in range(runs):
        for _, group in itertools.groupby(wanted, key=lambda point: (point.op, point.transfer)):
            order = list(group)
            random.Random(run).shuffle(order)
            yield from ((run, point) for point in order if (point, run) not in done)


class _Runner:
    """Makes the transfers. Holds the data, and the last measurement of the defaults."""

    def __init__(self, folder: Path, sweep: Sweep) -> None:
        self._folder = folder
        self._sweep = sweep
        self._source = folder / "source"
        generator = torch.Generator().manual_seed(0)
        host = torch.empty(sweep.nbytes, dtype=torch.uint8).random_(generator=generator)
        self._data = {HOST: host}
        self._target = {HOST: torch.empty_like(host)}
        words = [word for word in sweep.grid.transfers if word != HOST]
        if words:
            there = host.cuda()
            self._data |= dict.fromkeys(words, there)
            self._target |= dict.fromkeys(words, torch.empty_like(there))
        if "read" in sweep.grid.ops:
            self._write(self._source, host, Config())
        self._kind: tuple[str, str] | None = None
        self._bases: list[float] = []
        self._since = 0

    def result(self, point: Point, run: int) -> Result:
        """Measure a point, and the defaults before it if that is due."""
        base = self._bandwidth_of_defaults(point)
        error = ""
        try:
            sample = self._sample(point)
        except EngineUnavailableError as refused:
            sample, error = Sample(self._sweep.nbytes, 0.0, 0.0), str(refused)
        latency = sample.latency or Latency()
        return Result(
            run=run,
            point=point,
            seconds=sample.seconds,
            bandwidth=sample.bandwidth,
            ratio=sample.bandwidth / base,
            cpu_seconds=sample.cpu_seconds,
            p50=latency.p50,
            p95=latency.p95,
            p99=latency.p99,
            fallback=sample.fallback or "",
            error=error,
            when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            fastserial=__version__,
        )

    def _bandwidth_of_defaults(self, point: Point) -> float:
        """Return the bandwidth that a result is compared with: single ones vary too much."""
        kind = point.op, point.transfer
        default = Point.of_defaults(*kind)
        wanted = 1 if self._since >= _FRESH else 0
        if kind != self._kind:
            self._kind, wanted = kind, _LAST
            self._sample(default)  # a warm-up
        if wanted:
            self._bases += [self._sample(default).bandwidth for _ in range(wanted)]
            self._bases, self._since = self._bases[-_LAST:], 0
        self._since += 1
        return statistics.median(self._bases)

    def _sample(self, point: Point) -> Sample:
        config = Config(
            engine=point.engine,
            block_size=point.block_size,
            queue_depth=point.queue_depth,
            threads=point.threads,
            transfer=cast("Any", point.transfer),
        )
        settle(self._sweep.pause)
        if point.op == "read":
            return self._read(self._source, point.transfer, config)
        path = self._folder / "written"
        try:
            sample = self._write(path, self._data[point.transfer], config)
            self._read(path, HOST, Config())
        finally:
            path.unlink(missing_ok=True)
        return sample

    def _write(self, path: Path, data: torch.Tensor, config: Config) -> Sample:
        storage = data.untyped_storage()
        writer = FastFileWriter(path, config)

        def write() -> None:
            with writer:
                writer.save_torch_storage_object_list([(storage, torch.uint8)], save_size=False)

        used = measure(write)
        report = writer.report
        if report is None:
            raise BenchError(f"{path} was not written")
        taken = Transfer(report.transfer, report.transfer_why)
        return used.sample(report.bytes, report.complete, _fallback(config, taken, report.fallback))

    def _read(self, path: Path, transfer: str, config: Config) -> Sample:
        """Read a file that is not in the page cache, and compare.

        Raises:
            BenchError: it holds something else than was written, or stays in the page cache.
        """
        chill([path])
        target = self._target[transfer]
        target.zero_()  # also, so that the memory is there before the time is taken
        reader = FastFileReader(path, config)

        def read() -> None:
            with reader:
                reader.attend([target.untyped_storage()])
                sink = storage_sink(target.untyped_storage(), reader.ring)
                reader.read_into([ReadExtent(0, target.nbytes, sink)])

        used = measure(read)
        if not torch.equal(target, self._data[transfer]):
            raise BenchError(f"what was read with {config} is not what was written")
        counts = reader.blocks.counts
        latency = Latency.of(counts.complete_seconds)
        fallback = _fallback(config, reader.transfer, reader.blocks.fallback)
        return used.sample(target.nbytes, latency, fallback)


def _fallback(config: Config, taken: Transfer, fallback: str | None) -> str | None:
    """Return why it went another way than it was to: also if the transfer type is another one."""
    if taken.why and config.transfer not in ("auto", taken.word):
        return f"{taken.word}: {taken.why}"
    return fallback
