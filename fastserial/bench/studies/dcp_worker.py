"""One rank of `fastserial bench dcp`: a program of its own, started by the benchmark.

Every row begins from the same state: an empty folder, no dirty page, malloc's free memory is the
kernel's. A load begins likewise, when nothing of the folder's files is in the page cache and as
much free memory is there as they take; it fills tensors that are there. Times are those of the
slowest rank.
"""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.free_memory import fetch_free_memory
from fastserial.bench.measuring.measure import Sample, measure
from fastserial.bench.measuring.ranks import MARK
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.temperature import chill
from fastserial.bench.studies.dcp_plan import MIXED, PLANNED, STOCK, DcpBench, DcpRow, fio_name
from fastserial.bench.studies.dcp_states import blank_of, same, state_of, wipe
from fastserial.bench.subjects import fio
from fastserial.bench.subjects.dcp_ways import Way, our_way, stock_ways

__all__: list[str] = []

_TIMEOUT = timedelta(hours=1)  # while rank 0 looks for fio's best


@dataclass(frozen=True, slots=True)
class _Done:
    """What a save or load took on this rank, and what of it planning took (seconds)."""

    seconds: float
    planned: float | None = None


_Call = Callable[[], _Done]


def main() -> None:
    """Measure, and let rank 0 print the rows as JSON."""
    bench = DcpBench(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rows: list[DcpRow] = []
    for case in bench.cases:
        rows += _Case(bench, case).run()
    if dist.get_rank() == 0:
        text = json.dumps([asdict(row) for row in rows])
        sys.stdout.write(f"\n{MARK}{text}\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


class _Case:
    """Saves and loads of one state, in turn by each way."""

    def __init__(self, bench: DcpBench, case: str) -> None:
        self._bench = bench
        self._folder = Path(bench.folder) / "row"
        self._is_planning = case == PLANNED
        self._state = state_of(case, bench)
        self._target = blank_of(self._state)
        ranks = dist.get_world_size()
        self._ways: list[Way | _Fio] = []
        if case == MIXED and (found := _fio(bench)) is not None:
            self._ways.append(found)
        self._ways += _ways(case)
        self._rows = [DcpRow(way.name, case, ranks) for way in self._ways]
        gc.collect()
        gc.freeze()  # there is one before each run, and the compiler's modules would be its most

    def run(self) -> list[DcpRow]:
        """Return the rows."""
        for turn in range(self._bench.runs + 1):  # the first is a warm-up
            for way, row in zip(self._ways, self._rows, strict=True):
                if row.problem is None:
                    self._run(way, row, counts=turn > 0)
        return self._rows

    def _run(self, way: Way | _Fio, row: DcpRow, counts: bool) -> None:
        folder = self._fresh()
        save, load = self._calls(way, folder)
        told = _together(save, row)
        if told is None:
            return
        if counts:
            row.saves.append(max(seconds for seconds, _, _ in told))
            planned = [seconds for _, seconds, _ in told if seconds is not None]
            row.plans += [max(planned)] if planned else []
            row.save_extra = _highest(row.save_extra, told)
        if dist.get_rank() == 0:
            files = [path for path in folder.rglob("*") if path.is_file()]
            row.nbytes = sum(path.stat().st_size for path in files)
            chill(files)
            _settle(self._bench)
            fetch_free_memory(row.nbytes)
        wipe(self._target)
        told = _together(load, row)
        if told is None:
            return
        if counts:
            row.loads.append(max(seconds for seconds, _, _ in told))
            row.load_extra = _highest(row.load_extra, told)
        if isinstance(way, Way):
            equal: list[Any] = [None] * row.ranks
            dist.all_gather_object(equal, same(self._state, self._target))
            row.equal = all(equal) and row.equal is not False

    def _fresh(self) -> Path:
        """Return an empty folder, when nothing is left of the last row. Collective."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            _settle(self._bench)
        return self._folder

    def _calls(self, way: Way | _Fio, folder: Path) -> tuple[_Call, _Call]:
        if isinstance(way, _Fio):
            return way.calls(folder / "fio")
        group = None
        if way.anew:  # plans are kept with the group
            group = dist.new_group(backend="gloo")
            dist.barrier(group)

        def save() -> _Done:
            began = _begin()
            planned = way.save(self._state, folder, group, self._is_planning)
            return _Done(perf_counter() - began, planned)

        def load() -> _Done:
            began = _begin()
            way.load(self._target, folder)
            return _Done(perf_counter() - began)

        return save, load


@dataclass(frozen=True, slots=True)
class _Fio:
    """fio, on rank 0."""

    name: str
    jobs: int
    nbytes: int
    write: fio.FioVariant
    read: fio.FioVariant

    def calls(self, path: Path) -> tuple[_Call, _Call]:
        def run(call: Callable[[], Sample]) -> _Done:
            return _Done(call().seconds if dist.get_rank() == 0 else 0.0)

        return (
            lambda: run(lambda: fio.run_fio(self.write, path, self.nbytes, self.jobs)),
            lambda: run(lambda: fio.read_file(self.read, path, self.jobs)),
        )


def _ways(case: str) -> Sequence[Way]:
    if case == MIXED:
        return [*stock_ways(STOCK, True), our_way("dcp"), our_way("packed")]
    if case == PLANNED:
        return [*stock_ways(STOCK, False), our_way("dcp", anew=True), our_way("dcp")]
    ours = [our_way(format, anew) for format in ("dcp", "packed") for anew in (True, False)]
    return [stock_ways(STOCK, False)[0], *ours]


def _fio(bench: DcpBench) -> _Fio | None:
    """Return fio in its best variants, None without it. Collective."""
    found: list[Any] = [None]
    if bench.with_fio and dist.get_rank() == 0 and fio.installed():
        with contextlib.suppress(BenchError):
            found = [_best(bench, dist.get_world_size())]
    dist.broadcast_object_list(found)
    best: _Fio | None = found[0]
    return best


def _best(bench: DcpBench, jobs: int) -> _Fio:
    """Return fio's fastest variants.

    Raises:
        BenchError: fio cannot write or read there.
    """
    path = Path(bench.folder) / "fio"
    speeds: dict[fio.FioVariant, float] = {}

    def once(variant: fio.FioVariant) -> Sample:
        path.unlink(missing_ok=True)
        _settle(bench)
        sample = fio.run_fio(variant, path, bench.nbytes, jobs)
        speeds[variant] = sample.bandwidth
        return sample

    missing: dict[str, str] = {}
    try:
        write = max(fio.best_variants(once), key=speeds.__getitem__)
        reads = fio.best_reads(path, missing, lambda text: None, jobs)
    finally:
        path.unlink(missing_ok=True)
    if fio.READ not in reads:
        raise BenchError(missing[fio.READ])
    return _Fio(fio_name(jobs), jobs, bench.nbytes, write, reads[fio.READ])


def _settle(bench: DcpBench) -> None:
    if bench.pause:
        settle(bench.pause)


_Told = tuple[float, float | None, int | None]  # seconds, of them for planning, extra memory


def _together(call: _Call, row: DcpRow) -> list[_Told] | None:
    """Do something on all ranks; return what it took on each. A problem goes into the row."""
    done: list[_Done] = []
    told: list[Any] = [None] * dist.get_world_size()
    problem = None
    own: _Told = (0.0, None, None)
    try:
        used = measure(lambda: done.append(call()))
        own = (done[0].seconds, done[0].planned, used.extra_bytes)
    except (Exception, CheckpointException) as error:  # DCP's is none of the others
        problem = f"{type(error).__name__}: {error}"
    dist.all_gather_object(told, (own, problem))
    row.problem = next((text for _, text in told if text), None)
    return [one for one, _ in told] if row.problem is None else None


def _begin() -> float:
    """Return the time when all ranks are ready: they get there at different times."""
    dist.barrier()
    return perf_counter()


def _highest(known: int | None, told: Sequence[_Told]) -> int | None:
    """Return the highest peak of memory of a row."""
    peaks = [extra for _, _, extra in told if extra is not None]
    return max([*peaks, known or 0]) if peaks else None


if __name__ == "__main__":
    main()
