"""`fastserial bench load`: one checkpoint, every way to load it, and fio, in the same run.

Cold means that no page of the file is in the page cache, warm that all are. Loads need new
memory, which was freed a moment before or, in the last group, fresh: a hypervisor may have taken it
back, and touching it costs more than the load. Rows run interleaved, each load in a process of its
own, and what each one loads first is compared with what was saved.

A process of its own, as a program that resumes from a checkpoint does it: memory that was used
before is cheaper than new memory, and huge pages that one row asked for stay with the process. The
processes are forked from a server that has imported torch and fastserial: no import is timed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fastserial.bench import fio
from fastserial.bench.compare import fingerprints
from fastserial.bench.measure import BenchError, Sample, measure
from fastserial.bench.payload import check_gpu, mixed_state
from fastserial.bench.rotation import COLD, Plan, Row, rotate, summarize
from fastserial.bench.state import (
    check_memory,
    chill,
    fetch_free_memory,
    scratch,
    small_pages,
    warm,
)
from fastserial.bench.table import MEASURED, Column, Result, Table, verdict
from fastserial.bench.torch_rows import fast, stock, write
from fastserial.checkpoints.load_into import load_into
from fastserial.patching import load_hooks  # noqa: F401  (what the first load would import)
from fastserial.reports import format_bytes, last_load_report

__all__ = ["HOST", "TEMPERATURES", "LoadBench", "Reader", "run_load", "touch"]

HOST = "cpu"  # where to load to, if not to a device
WARM, FRESH = "warm", "warm, fresh memory"
TEMPERATURES = {"cold": COLD, "warm": WARM, "fresh": FRESH}
_HEADROOM = 256 << 20
_PAGE = 4096
_TAKEN_BACK = 4.0  # seconds in which a hypervisor takes back what is free
_FREE_BLOCKS = 2 << 30  # bytes, of which the kernel takes some: more than a small file needs
_STOCK = "stock zip"

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoadBench:
    """What to measure.

    Attributes:
        folder: where the checkpoint lies; its disk is what is measured.
        nbytes, tensors: of the state dict, about.
        runs: rounds that count; one warm-up comes before.
        temperatures: values of `TEMPERATURES`, those to measure.
        with_fio: compare cold loads with fio.
        gpu: load to the CUDA device.
        pause: seconds of rest between two runs.
    """

    folder: Path
    nbytes: int = 3 << 30
    tensors: int = 300
    runs: int = 5
    temperatures: tuple[str, ...] = tuple(TEMPERATURES.values())
    with_fio: bool = True
    gpu: bool = False
    pause: float = 0.2


@dataclass(frozen=True, slots=True)
class Reader:
    """One way to load. It is pickled: functions in it are those of a module, or parts of them.

    Attributes:
        name: what is measured.
        paths: files it reads, to be put into or out of the page cache.
        load: loads everything and returns it; it gets tensors to fill, if `fills`, else None.
        context: entered around the load and the timing.
        fills: it loads into tensors whose memory is there before it is timed.
        small_pages: it shuns huge pages, and is compared with a fio that has none.
        modules: what is imported before the load is timed.
        is_peer: another package's: it may fail here, and is not measured in fresh memory.
    """

    name: str
    paths: tuple[Path, ...]
    load: Callable[[State | None], State]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    fills: bool = False
    small_pages: bool = False
    modules: tuple[str, ...] = ()
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
        peers: writes the state in other formats to a folder, and makes readers of it to a device;
            says why some are not there.

    Raises:
        BenchError: too little memory or disk, the folder cannot be used, a load failed, or there
            is no GPU.
        PatchError: the installed torch cannot be patched.
    """
    with fast():  # before minutes are spent on other rows
        pass
    device = "cuda" if bench.gpu else HOST
    if bench.gpu:
        check_gpu(bench.nbytes)
    check_memory(3 * bench.nbytes)
    missing: dict[str, str] = {}
    with scratch(bench.folder, 4 * bench.nbytes + _HEADROOM) as folder:
        say("making the data")
        state = mixed_state(bench.nbytes, bench.tensors)
        readers, missing = peers(state, folder, device) if peers is not None else ([], {})
        readers = [*_readers(state, folder, device), *readers]
        path = readers[0].paths[0]
        yardsticks = {}
        if not bench.with_fio:
            missing[fio.READ] = "switched off (--no-fio)"
        elif COLD in bench.temperatures:
            yardsticks = fio.best_reads(path, missing, say)
        loads = _Loads(
            folder=folder,
            nbytes=sum(tensor.nbytes for tensor in state.values()),
            shapes={name: (one.dtype, tuple(one.shape)) for name, one in state.items()},
            expected=fingerprints(state),
            device=device,
        )
        del state
        rows = [loads.fio_row(name, variant, path) for name, variant in yardsticks.items()]
        rows += [
            loads.row(reader, temperature)
            for temperature in bench.temperatures
            for reader in readers
            if not (temperature == FRESH and reader.is_peer)
            if yardsticks or not reader.small_pages
        ]
        measured = rotate(rows, folder, Plan(bench.runs, pause=bench.pause), say)
    missing |= {one.row.name: one.problem for one in measured if one.problem is not None}
    found = summarize(measured, [f"{fio.READ}, {COLD}"])
    caption = (
        f"{bench.tensors} tensors, {format_bytes(bench.nbytes)}{', to the GPU' * bench.gpu}; "
        f"medians of {bench.runs} interleaved runs (least–greatest); ratios are of runs of the "
        "same round; memory is the peak beyond the data"
    )
    settings = {**asdict(bench), "folder": str(bench.folder)}
    table = Table(found, [*MEASURED, Column("equal", "equal", verdict)])
    return Result("load", bench.folder, caption, settings, [table], missing)


def touch(state: State) -> State:
    """Read one byte of every page, as a program that uses the tensors would."""
    for tensor in state.values():
        if tensor.numel() and tensor.device.type == HOST:
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            raw[::_PAGE].sum()
    return state


# -- readers -------------------------------------------------------------------------------------


def _readers(state: State, folder: Path, device: str) -> Iterator[Reader]:
    """Write the state dict in both containers, and yield the ways to load it."""
    paths = folder / "checkpoint.pt", folder / "checkpoint.legacy.pt"
    with stock():
        write(state, paths[0], "zip")
        write(state, paths[1], "legacy")
    place = None if device == HOST else device
    zip_, legacy = (partial(_load, path, place) for path in paths)
    yield Reader(_STOCK, paths[:1], zip_, stock)
    yield Reader(f"{_STOCK}, mmap, touched", paths[:1], partial(_mapped, paths[0], place), stock)
    yield Reader("stock legacy", paths[1:], legacy, stock)
    yield Reader("fastserial zip", paths[:1], zip_, fast)
    if place is None:
        pages = _fast_on_small_pages
        yield Reader("fastserial zip, small pages", paths[:1], zip_, pages, small_pages=True)
    yield Reader("fastserial zip, verified", paths[:1], zip_, partial(fast, verify_on_load=True))
    yield Reader("fastserial legacy", paths[1:], legacy, fast)
    yield Reader("fastserial load_into", paths[:1], partial(_fill, paths[0]), fills=True)


def _load(path: Path, place: str | None, _: State | None) -> State:
    found: State = torch.load(path, map_location=place)
    return found


def _mapped(path: Path, place: str | None, _: State | None) -> State:
    return touch(torch.load(path, map_location=place, mmap=True))


def _fill(path: Path, target: State | None) -> State:
    state = target or {}
    load_into(state, path)
    return state


@contextmanager
def _fast_on_small_pages() -> Iterator[None]:
    with fast(), small_pages():
        yield


# -- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """One load: the way, the tensors that it fills, where to, and whether to look at the result."""

    reader: Reader
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    device: str
    compare: bool


@dataclass(frozen=True, slots=True)
class _Loads:
    """Makes rows of a checkpoint that lies in a folder, and is to be loaded again and again."""

    folder: Path
    nbytes: int
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    expected: Mapping[str, str]
    device: str

    def row(self, reader: Reader, temperature: str) -> Row:
        equal: list[bool] = []

        def run(_: Path) -> Sample:
            self._prepare(reader.paths, temperature)
            task = _Task(reader, self.shapes, self.device, compare=not equal)
            sample, found = _load_afresh(task)
            if found is not None:
                equal.append(found == self.expected)
            extra = sample.extra_bytes
            if extra is not None and not reader.fills and self.device == HOST:
                extra -= self.nbytes  # beyond the data, whose memory was not there before
            return replace(sample, nbytes=self.nbytes, extra_bytes=extra)

        name, base = (f"{one}, {temperature}" for one in (reader.name, _STOCK))
        return Row(name, temperature, run, base, check=lambda _: equal[0], optional=reader.is_peer)

    def fio_row(self, name: str, variant: fio.FioVariant, path: Path) -> Row:
        def run(_: Path) -> Sample:
            self._prepare((), COLD)
            return fio.read_file(variant, path)

        return Row(f"{name}, {COLD}", COLD, run)

    def _prepare(self, paths: tuple[Path, ...], temperature: str) -> None:
        """Bring memory and page cache into the same state for every row.

        Of all files only those that a warm row reads are in the page cache.
        """
        kept = () if temperature == COLD else paths
        files = (path for path in self.folder.rglob("*") if path.is_file())
        chill(path for path in files if path not in kept)
        warm(kept)
        if temperature == FRESH:
            time.sleep(_TAKEN_BACK)
        else:
            fetch_free_memory(max(self.nbytes, min(16 * self.nbytes, _FREE_BLOCKS)))


def _load_afresh(task: _Task) -> tuple[Sample, Mapping[str, str] | None]:
    """Load in a new process; return what that took, and the fingerprints of what it loaded.

    Raises:
        BenchError: the load failed, or the process died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    _start_server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(task, theirs), daemon=True)
    process.start()
    theirs.close()
    found: Any = None
    try:
        found = ours.recv()
    except EOFError:
        pass
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
        ours.close()
    if isinstance(found, tuple):
        return found
    why = found or f"its process died, exit code {process.exitcode}"
    raise BenchError(f"{task.reader.name}: {why}")


def _start_server() -> None:
    """Start the server of the processes. Like them it ignores Ctrl-C: the parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


# -- in the new process --------------------------------------------------------------------------


def _serve(task: _Task, answer: Connection[Any, Any]) -> None:
    found: Any
    gc.freeze()  # a collection would copy every page that is shared with the server
    try:
        found = _timed(task)
    except BaseException as error:  # reported to the parent
        found = "".join(traceback.format_exception_only(error)).strip()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        answer.send(found)


def _timed(task: _Task) -> tuple[Sample, Mapping[str, str] | None]:
    reader, device = task.reader, task.device
    for module in reader.modules:
        importlib.import_module(module)
    _wait_for(device)  # its context begins here
    target = None
    if reader.fills:
        target = {
            name: torch.empty(shape, dtype=dtype, device=device).fill_(0)
            for name, (dtype, shape) in task.shapes.items()
        }
    kept: list[State] = []

    def load() -> None:
        kept.append(reader.load(target))
        _wait_for(device)

    with reader.context():
        used = measure(load)
    report = last_load_report() if not reader.is_peer else None
    if report is not None:
        used = replace(used, latency=report.complete, fallback=report.fallback)
    return used, fingerprints(kept[0]) if task.compare else None


def _wait_for(device: str) -> None:
    """Wait for all that a device has to do."""
    if device != HOST:
        wait: Any = torch.cuda.synchronize
        wait()
