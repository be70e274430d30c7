"""`fastserial bench load`: one checkpoint, every way to load it, and fio, in the same run.

Cold means that no page of the file is in the page cache, warm that all are. Loads need new memory,
which was freed a moment before or, in the last part, fresh: a hypervisor may have taken
it back, and touching it costs more than the load. Rows run interleaved,
each load in a process of its own, and what each one loaded is compared with what was saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fastserial import config
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.free_memory import fetch_free_memory
from fastserial.bench.measuring.identical import fingerprints
from fastserial.bench.measuring.machine import Place
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.summary import Line, line_of
from fastserial.bench.measuring.temperature import chill, warm
from fastserial.bench.studies.fresh_load import Task, load_afresh
from fastserial.bench.subjects import dcp
from fastserial.bench.subjects.fio import READ, FioVariant, best_reads, read_file
from fastserial.bench.subjects.model_state import check_gpu
from fastserial.bench.subjects.payload import check_memory, many_small, mixed_state
from fastserial.bench.subjects.readers import HOST, Files, Reader, Shapes, readers, shapes_of
from fastserial.bench.subjects.saving import check_torch, stock, write

__all__ = ["TEMPERATURES", "LoadBench", "LoadResult", "run_load"]

_HEADROOM = 256 << 20
_SMALL_COUNT = 20_000
_FRESH = "warm, fresh memory"
_TAKEN_BACK = 4.0  # seconds in which a hypervisor takes back what is free
_FREE_BLOCKS = 2 << 30  # bytes, of which the kernel takes some: more than a small file needs
COLD = "cold"
TEMPERATURES = (COLD, "warm", _FRESH)
_STOCK = "stock zip"


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
        temperatures: of TEMPERATURES, those to measure.
        pause: seconds of rest between two runs.
        gpu: load to the CUDA device.
    """

    folder: Path
    nbytes: int
    tensors: int = 300
    runs: int = 5
    small: bool = True
    peers: bool = True
    with_fio: bool = True
    temperatures: tuple[str, ...] = TEMPERATURES
    pause: float = 0.2
    gpu: bool = False

    @property
    def device(self) -> str:
        """Where to load to."""
        return "cuda" if self.gpu else HOST


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was measured, where, and with what options of fastserial.

    Attributes:
        missing: rows that are not there, and why.
    """

    bench: LoadBench
    place: Place
    lines: tuple[Line, ...]
    small: tuple[Line, ...]
    missing: dict[str, str]

    @property
    def equal(self) -> bool:
        """Whether everything that was loaded equals what was saved."""
        return all(line.equal is not False for line in (*self.lines, *self.small))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state dict that lies on the disk, and what must be loaded again."""

    files: Files
    shapes: Shapes
    nbytes: int
    expected: Mapping[str, str]


@dataclass(slots=True)
class _Row:
    """A way to load and a temperature, and its samples; memory is the peak beyond the data."""

    reader: Reader
    temperature: str
    samples: list[Sample] = field(default_factory=list)
    equal: bool | None = None


def run_load(bench: LoadBench, say: Callable[[str], None] = lambda text: None) -> LoadResult:
    """Run the benchmark; `say` receives a text for each step.

    Raises:
        BenchError: too little memory or disk, the folder cannot be used, a load failed, or there
            is no GPU.
        PatchError: the installed torch cannot be patched.
    """
    check_torch()
    if bench.gpu:
        check_gpu(bench.nbytes)
    check_memory(3 * bench.nbytes)
    with scratch(bench.folder, 4 * bench.nbytes + _HEADROOM) as folder:
        say("making the data")
        saved, missing = _save(mixed_state(bench.nbytes, bench.tensors), folder, bench.peers)
        found, absent = readers(saved.files, saved.shapes, bench.device)
        missing = {**absent, **missing} if bench.peers else {}
        if not bench.peers:
            found = [reader for reader in found if reader.group == "torch"]
        with_fio = bench.with_fio and COLD in bench.temperatures
        yardsticks = best_reads(saved.files.zip, missing, say) if with_fio else {}
        if not bench.with_fio:
            missing[READ] = "switched off (--no-fio)"
        if not yardsticks:
            found = [reader for reader in found if not reader.small_pages]
        lines = _measure(found, saved, bench, yardsticks, missing, say)
        small: list[Line] = []
        if bench.small:
            say("making the small tensors")
            saved, _ = _save(many_small(_SMALL_COUNT), folder, False)
            found = [one for one in found if one.paths == (saved.files.zip,)]
            found = [one for one in found if "mmap" not in one.name and not one.small_pages]
            small = _measure(found, saved, bench, {}, missing, say)
    return LoadResult(
        bench,
        Place.of(bench.folder, config.current()),
        tuple(lines),
        tuple(small),
        missing,
    )


def _save(
    state: dict[str, torch.Tensor], folder: Path, peers: bool
) -> tuple[_Saved, dict[str, str]]:
    """Write the state dict in every container, with the packages that made these formats."""
    paths = folder / "checkpoint.pt", folder / "checkpoint.legacy.pt"
    missing: dict[str, str] = {}
    with stock():
        write(state, paths[0], "zip")
        write(state, paths[1], "legacy")
    safetensors, sharded = folder / "checkpoint.safetensors", folder / "dcp"
    if peers:
        try:
            from safetensors.torch import save_file

            save_file(state, safetensors)
        except ImportError:
            missing["safetensors"] = "not installed: pip install safetensors"
        try:
            dcp.write(state, sharded)
        except (ImportError, RuntimeError) as error:
            missing["DCP"] = str(error)
    found = [path if peers and path.exists() else None for path in (safetensors, sharded)]
    nbytes = sum(tensor.nbytes for tensor in state.values())
    return _Saved(Files(*paths, *found), shapes_of(state), nbytes, fingerprints(state)), missing


# -- running -------------------------------------------------------------------------------------


def _measure(
    found: Sequence[Reader],
    saved: _Saved,
    bench: LoadBench,
    yardsticks: Mapping[str, FioVariant],
    missing: dict[str, str],
    say: Callable[[str], None],
) -> list[Line]:
    rows = [
        _Row(reader, temperature)
        for temperature in TEMPERATURES
        if temperature in bench.temperatures
        for reader in found
        if temperature != _FRESH or reader.group == "torch"
    ]
    fio: dict[str, list[Sample]] = {name: [] for name in yardsticks}
    for turn in range(bench.runs + 1):
        label = f"round {turn}/{bench.runs}" if turn else "warm-up"
        for name, yardstick in yardsticks.items():
            say(f"{label}: {COLD}, {name}")
            _prepare((), COLD, saved, bench.pause)
            fio[name] += [read_file(yardstick, saved.files.zip)] * (turn > 0)
        for row in rows.copy():
            say(f"{label}: {row.temperature}, {row.reader.name}")
            try:
                _run(row, saved, bench, first=turn == 0)
            except BenchError as error:
                if row.reader.group != "peer" or turn:
                    raise
                missing[row.reader.name] = f"it fails here: {error}"
                rows.remove(row)
    by_name = {(row.reader.name, row.temperature): row.samples for row in rows}
    base = {COLD: fio.get(READ)}
    return [line_of(name, COLD, samples, None, base[COLD]) for name, samples in fio.items()] + [
        line_of(
            row.reader.name,
            row.temperature,
            row.samples,
            by_name[_STOCK, row.temperature],
            base.get(row.temperature),
            row.equal,
        )
        for row in rows
    ]


def _prepare(paths: Sequence[Path], temperature: str, saved: _Saved, pause: float) -> None:
    """Bring memory and page cache into the same state for every row.

    Of all files only those that a warm row reads are in the page cache.
    """
    kept = () if temperature == COLD else paths
    chill(path for path in saved.files.all() if path not in kept)
    warm(kept)
    settle(pause)
    if temperature == _FRESH:
        time.sleep(_TAKEN_BACK)
    else:
        fetch_free_memory(max(saved.nbytes, min(16 * saved.nbytes, _FREE_BLOCKS)))


def _run(row: _Row, saved: _Saved, bench: LoadBench, *, first: bool) -> None:
    """Load once; the first is compared, the others count."""
    reader = row.reader
    _prepare(reader.paths, row.temperature, saved, bench.pause)
    loaded = load_afresh(Task(reader.name, saved.files, saved.shapes, first, bench.device))
    if loaded.fingerprints is not None:
        row.equal = loaded.fingerprints == saved.expected
    if first:
        return
    # memory that was there before the load (`prepare`) is not in the peak
    sample = loaded.usage.sample(saved.nbytes, loaded.latency, loaded.fallback)
    if sample.extra_bytes is not None and not loaded.was_there:
        sample = replace(sample, extra_bytes=sample.extra_bytes - saved.nbytes)
    row.samples.append(sample)
