"""Raw transfers with every combination of settings, as gdsio sweeps.

One storage goes to a new file and is made durable, or comes from a file of which nothing is in the
page cache; no pickle, no container. Writes are read back, reads are compared. The defaults are
measured again and again in between, and each result has its ratio to the median of their last
runs. It is a line of the CSV at once. At the end the settings that are clearly faster than the
defaults are printed, as variables to copy.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from common import Picture, Say, Script, size

from fastserial import __version__, engines
from fastserial.bench.measure import MB, BenchError, Sample, measure, parse_bytes
from fastserial.bench.rotation import Spread
from fastserial.bench.state import check_memory, chill, scratch, settle
from fastserial.bench.table import Column, Result, Table, number
from fastserial.config import TRANSFERS, Config, parse_size
from fastserial.config.performance import KiB, MiB
from fastserial.engines.gds.memory import missing
from fastserial.errors import ConfigError, EngineUnavailableError
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import ReadExtent, storage_sink
from fastserial.reports import Latency, Transfer
from fastserial.saving.writer import FastFileWriter

_T = TypeVar("_T")
_OPS = ("write", "read")
_HOST = "cpu"  # the transfer type that has no device in it
_FRESH = 4  # results until the defaults are measured again
_LAST = 3  # measurements of the defaults whose median results are compared with
_COPIES = 2
_HEADROOM = 64 << 20
_MOST_MEMORY = 256 << 20  # bytes of a combination's blocks together
_GAIN = 1.03  # over the defaults: less is not worth other settings


def _size(nbytes: int) -> str:
    """Return a size as options take it: `_size(2097152)` is `2MiB`, 524288 `512KiB`."""
    if nbytes % MiB == 0:
        return f"{nbytes // MiB}MiB"
    return f"{nbytes // KiB}KiB" if nbytes % KiB == 0 else str(nbytes)


_COLUMNS = (
    Column("block_size", "block size", _size),
    Column("queue_depth", "depth"),
    Column("threads", "threads"),
    Column("bytes_per_second", "MB/s", number(MB)),
    Column("ratio_to_default", "× defaults", number(1, 2)),
)


class _Point(NamedTuple):
    """One combination: `op` is `write` or `read`; the rest as in `fastserial.Config`."""

    op: str
    transfer: str
    engine: str
    block_size: int
    queue_depth: int
    threads: int

    @classmethod
    def of_defaults(cls, op: str, transfer: str) -> _Point:
        """Return the default settings for a kind of transfer."""
        config = Config()
        counts = config.block_size, config.queue_depth, config.threads
        return cls(op, transfer, str(config.engine), *counts)

    def config(self) -> Config:
        """Return the settings."""
        transfer: Any = self.transfer
        return Config(
            engine=self.engine,
            block_size=self.block_size,
            queue_depth=self.queue_depth,
            threads=self.threads,
            transfer=transfer,
        )


# A line of the CSV begins with these: what was measured, and where.
_KEY = ("folder", "bytes", "run", *_Point._fields)
_SPEED = ("seconds", "bw_bytes", "ratio_to_default", "cpu_seconds")
_LATENCY = ("lat_p50_us", "lat_p95_us", "lat_p99_us")
_FOUND = (*_SPEED, *_LATENCY, "fallback", "error", "when", "fastserial")


def _measure(options: argparse.Namespace, say: Say) -> Result:
    wanted = _points(options)
    check_memory(_COPIES * options.size)
    rows = []
    with (
        scratch(options.folder, _COPIES * options.size + _HEADROOM) as folder,
        _Results(options.csv, options.folder, options.size) as results,
    ):
        transfers = {point.transfer for point in wanted}
        runner = _Runner(folder, options.size, transfers, options.pause)
        for number_, (run, point) in enumerate(_in_turn(wanted, options.runs), 1):
            say(f"{number_}/{len(wanted) * options.runs}: {' '.join(map(str, point))}")
            results.add(run, point, runner.result(point))
        for point in wanted:
            found = [results.rows[run, point] for run in range(options.runs)]
            rows.append(_row(point, found))
    rows.sort(key=lambda row: (row["op"], row["transfer"], -row["ratio_to_default"].median))
    caption = (
        f"{_size(options.size)} per transfer; medians of {options.runs} runs (least–greatest), the "
        f"best first; results in {options.csv}"
    )
    kinds = dict.fromkeys((row["op"], row["transfer"]) for row in rows)
    tables = []
    notes = []
    for op, transfer in kinds:
        of_kind = [row for row in rows if (row["op"], row["transfer"]) == (op, transfer)]
        tables.append(Table(of_kind, _COLUMNS, f"{op}, {transfer}"))
        notes += _best_settings(of_kind)
    settings = {"bytes": options.size, "runs": options.runs}
    return Result("sweep", options.folder, caption, settings, tables, notes=notes)


def _row(point: _Point, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    default = point == _Point.of_defaults(point.op, point.transfer)
    return {
        "name": point.engine + " (default)" * default,
        **point._asdict(),
        "bytes_per_second": Spread.of(float(one["bw_bytes"]) for one in found),
        "ratio_to_default": Spread.of(float(one["ratio_to_default"]) for one in found),
        "problem": next((one["error"] for one in found if one["error"]), None),
    }


def _best_settings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was found for a kind of transfer, and the settings to copy.

    Those only where something is clearly faster than the defaults: `_GAIN` in the median, and
    faster in every run. They stand in front of a command:
    `FASTSERIAL_BLOCK_SIZE=4MiB FASTSERIAL_QUEUE_DEPTH=8 ... python train.py`.
    """
    kind = f"# {rows[0]['op']}, {rows[0]['transfer']}"
    for row in rows:
        ratio = row["ratio_to_default"]
        if ratio.median >= _GAIN and ratio.low > 1:
            values = {
                "BLOCK_SIZE": _size(row["block_size"]),
                "QUEUE_DEPTH": row["queue_depth"],
                "THREADS": row["threads"],
                "ENGINE": row["engine"],
            }
            if row["transfer"] != _HOST:
                values["TRANSFER"] = row["transfer"]
            words = " ".join(f"FASTSERIAL_{name}={value}" for name, value in values.items())
            return [f"{kind}: {ratio.median:.2f} × the defaults", words]
    return [f"{kind}: no setting is clearly faster than the defaults"]


# -- what is combined ----------------------------------------------------------------------------


def _points(options: argparse.Namespace) -> list[_Point]:
    """Return the combinations; threads that would have no block are left out.

    Raises:
        ConfigError: a value is impossible.
        EngineUnavailableError: an engine asked for cannot run here.
        BenchError: nothing is left, or a transfer type cannot be had here.
    """
    names = _values(options.engine, str, "--engine")
    for name in names:
        engines.load(name)
    names = names or [one.name for one in engines.survey() if one.missing is None]
    numbers = {str(index): word for index, word in enumerate(TRANSFERS)}
    transfers = _values(options.transfer, lambda word: numbers.get(word, word), "--transfer")
    if not transfers:
        there = [word for word in TRANSFERS if word != _HOST and missing(word) is None]
        transfers = [_HOST, *there] if torch.cuda.is_available() else [_HOST]
    for word in transfers:
        why = missing(word) if word in TRANSFERS else f"none of {', '.join(TRANSFERS)}"
        if why is None and word != _HOST and not torch.cuda.is_available():
            why = "it needs a CUDA device; torch sees none"
        if why is not None:
            raise BenchError(f"transfer {word!r}: {why}")
    ops = _values(options.op, str, "--op")
    if not set(ops) <= set(_OPS):
        raise ConfigError(f"--op: give {' or '.join(_OPS)}, not {options.op!r}")
    grid = itertools.product(
        ops,
        transfers,
        names,
        _values(options.block_size, parse_bytes, "--block-size"),
        _values(options.queue_depth, parse_size, "--queue-depth"),
        _values(options.threads, parse_size, "--threads"),
    )
    every = list(itertools.starmap(_Point, grid))
    for point in every:
        point.config()  # refuses what is impossible
    wanted = [
        point
        for point in every
        if point.threads <= point.queue_depth
        and point.block_size * point.queue_depth <= _MOST_MEMORY
    ]
    if not wanted:
        raise BenchError("no combination is left: each needs threads ≤ queue depth, and memory")
    return wanted


def _values(text: str, parse: Callable[[str], _T], option: str) -> list[_T]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        return list(dict.fromkeys(parse(word) for word in words))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def _in_turn(wanted: Sequence[_Point], runs: int) -> Iterator[tuple[int, _Point]]:
    """Yield what is to be done: run by run, so that drift of the machine hits all points alike.

    Within a run and a kind of transfer the order is random, and the same each time.
    """
    for run in range(runs):
        for _, group in itertools.groupby(wanted, key=lambda point: point[:2]):
            order = list(group)
            random.Random(run).shuffle(order)
            yield from ((run, point) for point in order)


# -- results -------------------------------------------------------------------------------------


class _Results:
    """A new CSV file. Each result is there at once, also if this process is killed."""

    def __init__(self, path: Path, folder: Path, nbytes: int) -> None:
        """Create the file.

        Raises:
            BenchError: there is a file.
            OSError: it cannot be created.
        """
        self.rows: dict[tuple[int, _Point], dict[str, Any]] = {}
        self._same = {"folder": str(folder.absolute()), "bytes": nbytes}
        try:
            self._file = path.open("x", encoding="utf-8", newline="")
        except FileExistsError:
            raise BenchError(f"{path} exists: give another --csv") from None
        self._writer = csv.DictWriter(self._file, [*_KEY, *_FOUND], lineterminator="\n")
        self._writer.writeheader()

    def add(self, run: int, point: _Point, found: dict[str, Any]) -> None:
        """Add a line."""
        row = {**self._same, "run": run, **point._asdict(), **found}
        self.rows[run, point] = row
        self._writer.writerow({name: str(value).replace("\n", " ") for name, value in row.items()})
        self._file.flush()

    def __enter__(self) -> _Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


# -- transfers -----------------------------------------------------------------------------------


class _Runner:
    """Makes the transfers. Holds the data, and the last measurements of the defaults."""

    def __init__(self, folder: Path, nbytes: int, transfers: set[str], pause: float) -> None:
        self._folder, self._pause = folder, pause
        self._source = folder / "source"
        generator = torch.Generator().manual_seed(0)
        host = torch.empty(nbytes, dtype=torch.uint8).random_(generator=generator)
        self._data = {_HOST: host}
        self._target = {_HOST: torch.empty_like(host)}
        words = transfers - {_HOST}
        if words:
            there = host.cuda()
            self._data |= dict.fromkeys(words, there)
            self._target |= dict.fromkeys(words, torch.empty_like(there))
        self._kind: tuple[str, str] | None = None
        self._bases: list[float] = []
        self._since = 0

    def result(self, point: _Point) -> dict[str, Any]:
        """Measure a point, and the defaults before it if that is due."""
        base = self._bandwidth_of_defaults(point)
        error = ""
        try:
            sample = self._sample(point)
        except EngineUnavailableError as refused:
            sample, error = Sample(0, 0.0, 0.0), str(refused)
        latency = sample.latency or Latency()
        now = datetime.datetime.now(datetime.timezone.utc)
        return {
            "seconds": f"{sample.seconds:.6f}",
            "bw_bytes": f"{sample.bandwidth:.0f}",
            "ratio_to_default": f"{sample.bandwidth / base:.4f}",
            "cpu_seconds": f"{sample.cpu_seconds:.6f}",
            "lat_p50_us": f"{latency.p50 * 1e6:.1f}",
            "lat_p95_us": f"{latency.p95 * 1e6:.1f}",
            "lat_p99_us": f"{latency.p99 * 1e6:.1f}",
            "fallback": sample.fallback or "",
            "error": error,
            "when": now.isoformat(timespec="seconds"),
            "fastserial": __version__,
        }

    def _bandwidth_of_defaults(self, point: _Point) -> float:
        """Return the bandwidth that a result is compared with: single ones vary too much."""
        kind = point.op, point.transfer
        default = _Point.of_defaults(*kind)
        wanted = 1 if self._since >= _FRESH else 0
        if kind != self._kind:
            self._kind, wanted = kind, _LAST
            self._sample(default)  # a warm-up
        if wanted:
            self._bases += [self._sample(default).bandwidth for _ in range(wanted)]
            self._bases, self._since = self._bases[-_LAST:], 0
        self._since += 1
        return statistics.median(self._bases)

    def _sample(self, point: _Point) -> Sample:
        if point.op == "read":
            if not self._source.exists():
                self._write(self._source, self._data[_HOST], Config())
            settle(self._pause)
            return self._read(self._source, point.transfer, point.config())
        path = self._folder / "written"
        settle(self._pause)
        try:
            sample = self._write(path, self._data[point.transfer], point.config())
            self._read(path, _HOST, Config())
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
        fallback = _fallback(config, taken, report.fallback)
        return replace(used, nbytes=report.bytes, latency=report.complete, fallback=fallback)

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
        latency = Latency.of(reader.blocks.counts.complete_seconds)
        fallback = _fallback(config, reader.transfer, reader.blocks.fallback)
        return replace(used, nbytes=target.nbytes, latency=latency, fallback=fallback)


def _fallback(config: Config, taken: Transfer, fallback: str | None) -> str | None:
    """Return why it is slower than it was to be: also if the transfer type is another one."""
    if taken.why and config.transfer not in ("auto", taken.word):
        return f"{taken.word}: {taken.why}"
    return fallback


if __name__ == "__main__":
    brief = {"size": 16 << 20, "runs": 1, "block_size": "1MiB,4MiB", "queue_depth": "2,6"}
    brief |= {"threads": "2,6", "engine": "threads"}
    by = ("engine", "queue_depth", "threads")
    picture = Picture("ratio_to_default", "× defaults", 1, "block_size", by)
    script = Script(__doc__, "two hours", brief, picture)
    results = Path("fastserial-sweep.csv")
    script.add("--csv", type=Path, metavar="FILE", default=results, help="each result, at once")
    script.parser.set_defaults(pause=0.05)
    script.add("--size", type=size, default=512 << 20, help="of each transfer")
    sizes = "256KiB,1MiB,2MiB,4MiB,8MiB,16MiB"
    script.add("--block-size", default=sizes, help="to combine, with commas")
    script.add("--queue-depth", default="1,2,6,16", help="to combine, with commas")
    script.add("--threads", default="1,2,6,16", help="to combine, with commas")
    script.add("--engine", default="", help="to combine, with commas; default: all that can run")
    transfers_help = (
        "cpu, cpu_gpu, gds, ... (docs/guide/gpu.md), or gdsio's numbers (0 to 6); "
        "default: cpu, and with CUDA all that can be had"
    )
    script.add("--transfer", default="", help=transfers_help)
    script.add("--op", default="write,read", help="to combine, with commas")
    script.run(_measure)
