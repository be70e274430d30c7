"""`fastserial bench load`: one checkpoint, loaded by stock torch, by fastserial, and read by fio.

Cold means that no page of the file is in the page cache, warm that all are. Rows run interleaved,
and what each one loads first is compared with what was saved.

Each load has a process of its own, as in a program that resumes from a checkpoint: memory that was
used before is cheaper than new memory, and huge pages that one row asked for stay with the process.
The processes are forked from a server that has imported torch and fastserial: no import is timed.
"""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastserial.bench import fio
from fastserial.bench.measure import BenchError, Sample, measure
from fastserial.bench.payload import check_gpu, fingerprints, mixed_state
from fastserial.bench.rotation import COLD, Bench, Row
from fastserial.bench.state import check_memory, chill, fetch_free_memory, scratch, warm
from fastserial.bench.table import MEASURED, Column, Result, verdict
from fastserial.bench.torch_rows import fast, stock, write
from fastserial.checkpoints.load_into import load_into
from fastserial.patching import load_hooks  # noqa: F401  (what the first load would import)
from fastserial.reports import format_bytes, last_load_report

_HOST = "cpu"  # where to load to, if not to a device
TEMPERATURES = (COLD, "warm")
_HEADROOM = 256 << 20
_FREE_BLOCKS = 2 << 30  # bytes, of which the kernel takes some: more than a small file needs
_STOCK = "stock zip"

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBench(Bench):
    """What to load, and how to measure.

    Attributes:
        temperatures: those of `TEMPERATURES` to measure.
    """

    temperatures: tuple[str, ...] = TEMPERATURES


@dataclass(frozen=True, slots=True)
class Reader:
    """How to load. It is pickled, so its functions are those of a module, or partials of them.

    Attributes:
        name: what is measured.
        paths: files it reads, to be put into or out of the page cache.
        load: loads everything and returns it; it gets tensors to fill, if `fills`, else None.
        context: entered around the load and the timing.
        fills: it loads into tensors that were allocated before the timing.
        is_peer: another package's, which may fail here.
    """

    name: str
    paths: tuple[Path, ...]
    load: Callable[[State | None], State]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    fills: bool = False
    is_peer: bool = False


Peers = Callable[[State, Path, str], tuple[list[Reader], dict[str, str]]]


def run_load(
    bench: LoadBench,
    say: Callable[[str], None] = lambda text: None,
    peers: Peers | None = None,
) -> Result:
    """Run the benchmark.

    Args:
        bench: what to measure.
        say: receives a text for each step.
        peers: given the state, its zip file and a device, writes the state in other formats beside
            that file, and makes readers of them all; says why some are not there.

    Raises:
        BenchError: too little memory or disk, the folder cannot be used, a load failed, or there
            is no GPU.
        PatchError: the installed torch cannot be patched.
    """
    with fast():  # before minutes are spent on other rows
        pass
    if bench.gpu:
        check_gpu(bench.nbytes)
    check_memory(3 * bench.nbytes)
    files = 4 if peers is not None else 1
    with scratch(bench.folder, files * bench.nbytes + _HEADROOM) as folder:
        say("making the data")
        state = mixed_state(bench.nbytes, bench.tensors)
        path = folder / "checkpoint.pt"
        readers = [*_readers(state, path, bench.device)]
        missing: dict[str, str] = {}
        if peers is not None:
            others, missing = peers(state, path, bench.device)
            readers += others
        saved = _Saved(
            folder=folder,
            nbytes=sum(tensor.nbytes for tensor in state.values()),
            shapes={name: (one.dtype, tuple(one.shape)) for name, one in state.items()},
            prints=fingerprints(state),
            device=bench.device,
        )
        del state

        def read(settings: fio.FioSettings, _: object = None) -> Sample:
            say(f"reading with {settings}")
            saved.prepare(())
            return fio.read_file(settings, path)

        best = bench.best_of_fio(read, missing) if COLD in bench.temperatures else None
        rows = [Row(f"fio read, {COLD}", COLD, partial(read, best))] if best is not None else []
        rows += [_row(saved, one, at) for at in bench.temperatures for one in readers]
        what = f"{bench.tensors} tensors, {format_bytes(bench.nbytes)}{', to the GPU' * bench.gpu}"
        columns = [*MEASURED, Column("equal", "equal", verdict)]
        return bench.run("load", what, rows, folder, missing, columns, say)


# -- readers -------------------------------------------------------------------------------------


def _readers(state: State, path: Path, device: str) -> Iterator[Reader]:
    """Write the state dict to a file, and yield how to load it."""
    with stock():
        write(state, path, "zip")
    target = None if device == _HOST else device
    whole = partial(_load, path, target)
    yield Reader(_STOCK, (path,), whole, stock)
    yield Reader("fastserial zip", (path,), whole, fast)
    yield Reader("fastserial zip, verified", (path,), whole, partial(fast, verify_on_load=True))
    yield Reader("fastserial load_into", (path,), partial(_fill, path), fills=True)


def _load(path: Path, target: str | None, _: State | None) -> State:
    found: State = torch.load(path, map_location=target)
    return found


def _fill(path: Path, target: State | None) -> State:
    state = target or {}
    load_into(state, path)
    return state


# -- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state dict in files of a folder: its size, its tensors, their fingerprints, where to."""

    folder: Path
    nbytes: int
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    prints: Mapping[str, str]
    device: str

    def prepare(self, paths: tuple[Path, ...]) -> None:
        """Give every row the same state of memory and page cache: only its files are in that."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        chill(path for path in files if path not in paths)
        warm(paths)
        fetch_free_memory(max(self.nbytes, min(16 * self.nbytes, _FREE_BLOCKS)))


def _row(saved: _Saved, reader: Reader, temperature: str) -> Row:
    equal: list[bool] = []

    def run(_: Path) -> Sample:
        saved.prepare(() if temperature == COLD else reader.paths)
        sample, found = _load_afresh(saved, reader, compare=not equal)
        if found is not None:
            equal.append(found == saved.prints)
        extra = sample.extra_bytes
        if extra is not None and not reader.fills and saved.device == _HOST:
            extra -= saved.nbytes  # beyond the data, whose memory was not there before
        return replace(sample, nbytes=saved.nbytes, extra_bytes=extra)

    name, base = (f"{one}, {temperature}" for one in (reader.name, _STOCK))
    return Row(name, temperature, run, base, check=lambda _: equal[0], optional=reader.is_peer)


def _load_afresh(
    saved: _Saved, reader: Reader, compare: bool
) -> tuple[Sample, Mapping[str, str] | None]:
    """Load in a new process; return what that took, and the fingerprints of what it loaded.

    Raises:
        BenchError: the load failed, or the process died.
    """
    context = multiprocessing.get_context("forkserver")  # which ignores Ctrl-C itself
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, context) as process:
        try:
            return process.submit(_timed, saved, reader, compare).result()
        except BrokenProcessPool as error:
            raise BenchError(f"{reader.name}: its process died") from error
        except Exception as error:
            why = "".join(traceback.format_exception_only(error)).strip()
            raise BenchError(f"{reader.name}: {why}") from error


# -- in the new process --------------------------------------------------------------------------


def _timed(saved: _Saved, reader: Reader, compare: bool) -> tuple[Sample, Mapping[str, str] | None]:
    gc.freeze()  # a collection would copy every page that is shared with the server
    _wait_for(saved.device)  # its context begins here
    target = None
    if reader.fills:
        target = {
            name: torch.empty(shape, dtype=dtype, device=saved.device).fill_(0)
            for name, (dtype, shape) in saved.shapes.items()
        }
    kept: list[State] = []

    def load() -> None:
        kept.append(reader.load(target))
        _wait_for(saved.device)

    with reader.context():
        used = measure(load)
    report = last_load_report() if not reader.is_peer else None
    if report is not None:
        used = replace(used, fallback=report.fallback)
    return used, fingerprints(kept[0]) if compare else None


def _wait_for(device: str) -> None:
    """Wait for all that a device has to do."""
    if device != _HOST:
        wait: Any = torch.cuda.synchronize
        wait()
