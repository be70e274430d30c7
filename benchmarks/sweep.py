"""Raw transfers with every combination of settings, as gdsio sweeps.

One storage goes to a new file and is made durable, or comes from a file of which nothing is in the
page cache; no pickle, no container. Writes are read back, reads are compared. The combinations and
the defaults are measured in turn, and compared round by round. At the end it prints the settings
that are clearly faster than the defaults, as variables to copy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from common import Picture, Say, Script, size

from fastserial import engines
from fastserial.bench.measure import MB, BenchError, Sample, measure
from fastserial.bench.rotation import Row, rotate, summarize
from fastserial.bench.state import check_memory, chill, scratch
from fastserial.bench.table import Column, Result, Table, number
from fastserial.config import TRANSFERS, Config, parse_size
from fastserial.config.performance import KiB, MiB
from fastserial.engines.gds.memory import missing
from fastserial.errors import ConfigError, EngineUnavailableError
from fastserial.loading.reader import FastFileReader, ReadExtent, storage_sink
from fastserial.reports import Transfer
from fastserial.saving.writer import FastFileWriter

_T = TypeVar("_T")
_OPS = ("write", "read")
_HOST = "cpu"  # the transfer type that has no device in it
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

    @property
    def kind(self) -> str:
        """The kind of transfer, whose combinations are compared."""
        return f"{self.op}, {self.transfer}"

    @property
    def default(self) -> _Point:
        """The default settings for this kind of transfer."""
        config = Config()
        counts = config.block_size, config.queue_depth, config.threads
        return _Point(self.op, self.transfer, str(config.engine), *counts)

    @property
    def name(self) -> str:
        """A name of its own."""
        blocks = f"{self.queue_depth} × {_size(self.block_size)}"
        default = " (default)" * (self == self.default)
        return f"{self.kind}: {self.engine}, {blocks}, {self.threads} threads{default}"

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


def _measure(options: argparse.Namespace, say: Say) -> Result:
    wanted = _points(options)
    check_memory(_COPIES * options.size)
    with scratch(options.folder, _COPIES * options.size + _HEADROOM) as folder:
        data = _Data(folder, options.size, {point.transfer for point in wanted})
        rows = [data.row(point) for point in wanted]
        measured = rotate(rows, folder, options.runs, options.pause, say)
        data.source.unlink(missing_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    points = {point.name: point for point in wanted}
    for row in summarize(measured):
        row |= points[row["name"]]._asdict()
        row["ratio_to_default"] = row.pop("to_stock")
        found.setdefault(row.pop("group"), []).append(row)
    for rows_ in found.values():
        rows_.sort(key=lambda row: -row["ratio_to_default"].median)
    caption = (
        f"{_size(options.size)} per transfer; medians of {options.runs} runs (least–greatest), the "
        "best first"
    )
    refused = {one.row.name: one.problem for one in measured if one.problem is not None}
    tables = [Table(rows_, _COLUMNS, kind) for kind, rows_ in found.items()]
    notes = [note for kind, rows_ in found.items() for note in _best_settings(kind, rows_)]
    settings = {"bytes": options.size, "runs": options.runs}
    return Result("sweep", options.folder, caption, settings, tables, refused, notes)


def _best_settings(kind: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was found for a kind of transfer, and the settings to copy.

    Those only where something is clearly faster than the defaults: `_GAIN` in the median, and
    faster in every run. They stand in front of a command:
    `FASTSERIAL_BLOCK_SIZE=4MiB FASTSERIAL_QUEUE_DEPTH=8 ... python train.py`.
    """
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
            return [f"# {kind}: {ratio.median:.2f} × the defaults", words]
    return [f"# {kind}: no setting is clearly faster than the defaults"]


# -- what is combined ----------------------------------------------------------------------------


def _points(options: argparse.Namespace) -> list[_Point]:
    """Return the defaults and the combinations; threads that would have no block are left out.

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
        _values(options.block_size, parse_size, "--block-size"),
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
    return list(dict.fromkeys([*(point.default for point in wanted), *wanted]))


def _values(text: str, parse: Callable[[str], _T], option: str) -> list[_T]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        return list(dict.fromkeys(parse(word) for word in words))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


# -- transfers -----------------------------------------------------------------------------------


class _Data:
    """What is transferred, from where and to where, by type of transfer."""

    def __init__(self, folder: Path, nbytes: int, transfers: set[str]) -> None:
        self.source = folder / "source"
        generator = torch.Generator().manual_seed(0)
        host = torch.empty(nbytes, dtype=torch.uint8).random_(generator=generator)
        self._data = {_HOST: host}
        self._target = {_HOST: torch.empty_like(host)}
        words = transfers - {_HOST}
        if words:
            there = host.cuda()
            self._data |= dict.fromkeys(words, there)
            self._target |= dict.fromkeys(words, torch.empty_like(there))
        self._write(self.source, host, Config())

    def row(self, point: _Point) -> Row:
        """Return the row of a point."""

        def run(path: Path) -> Sample:
            try:
                if point.op == "read":
                    return self._read(self.source, point.transfer, point.config())
                sample = self._write(path, self._data[point.transfer], point.config())
                self._read(path, _HOST, Config())
            except EngineUnavailableError as error:
                raise BenchError(str(error)) from error
            return sample

        return Row(point.name, point.kind, run, stock=point.default.name, optional=True)

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
        return replace(used, nbytes=report.bytes, fallback=fallback)

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
        fallback = _fallback(config, reader.transfer, reader.blocks.fallback)
        return replace(used, nbytes=target.nbytes, fallback=fallback)


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
