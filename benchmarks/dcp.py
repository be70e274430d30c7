"""Saves and loads with torch.distributed.checkpoint: stock in its settings, fastserial, and fio.

Saves go into an empty folder and are durable: the fsync of the folder is added to stock's. A load
begins when nothing of the folder's files is in the page cache and as much free memory is there as
they take; it fills tensors that are there. Times are those of the slowest rank. "first save" has a
new process group in each round: nothing is known of any plan. Exit status 1 if a loaded state
differs.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Picture, Say, Script, size
from peers import stock_with
from ranks import (
    WORKER,
    Done,
    best_fio,
    everywhere,
    finish,
    fio_name,
    fresh,
    highest,
    run_ranks,
    slowest,
    start,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial.bench import fio
from fastserial.bench.measure import MB, Sample
from fastserial.bench.payload import fill, tensor_sizes
from fastserial.bench.state import check_memory, chill, fetch_free_memory, scratch, settle
from fastserial.bench.table import Column, Result, Spread, Table, number, ratio, verdict
from fastserial.bench.table import size as shown
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)
from fastserial.reports import format_bytes

_MIXED, _SMALL, _SHARDS, _PLANNING = _CASES = ("mixed", "small", "small-shards", "planning")
_STOCK = "DCP"  # as it comes; begins the names of its other rows
_IN_MEMORY = 4  # the state, what it is loaded into, stock's page cache, and its copies
_ON_DISK = 2  # a checkpoint, and the file of one before while it is being freed
_COPY_AHEAD = 100_000_000  # bytes; ten times what is ahead by default
_WIDTH = 64  # elements of a row of a tensor
_FEW = 8  # elements of a small tensor: 32 bytes
_RATIO = number(1, 2)
_LOADED = (
    Column("load_seconds", "load, s", number(1, 3)),
    Column("load_to_fio", "× fio", _RATIO),
    Column("load_to_stock", "× DCP", _RATIO),
)
_OF_MIXED = (
    Column("seconds", "save, s", _RATIO),
    Column("bytes_per_second", "MB/s", number(MB)),
    Column("to_fio", "× fio", _RATIO),
    Column("to_stock", "× DCP", _RATIO),
    *_LOADED,
    Column("save_extra_bytes", "memory, save", shown),
    Column("load_extra_bytes", "memory, load", shown),
    Column("equal", "equal", verdict),
)
_OF_SMALL = (
    Column("seconds", "save, ms", number(1e-3)),
    Column("plan_seconds", "of it to plan", number(1e-3, 1)),
    Column("to_stock", "× DCP", _RATIO),
    Column("plan_to_stock", "plan × DCP", _RATIO),
    *_LOADED[::2],
    Column("bytes", "on disk", shown),
    Column("equal", "equal", verdict),
)


def _measure(options: argparse.Namespace, say: Say) -> Result:
    check_memory(_IN_MEMORY * options.size)
    settings = {
        "cases": list(dict.fromkeys(options.case or _CASES)),
        "nbytes": options.size,
        "tensors": options.tensors,
        "small": options.small,
        "planned": options.planned,
        "runs": options.runs,
        "with_fio": not options.no_fio,
        "pause": options.pause,
    }
    tables = []
    with scratch(options.folder, _ON_DISK * options.size) as folder:
        for ranks in dict.fromkeys(options.ranks or (1, 2, 4)):
            say(f"saving and loading in turn on {ranks} rank{'s' * (ranks > 1)}")
            found = run_ranks(__file__, {**settings, "folder": str(folder)}, ranks)
            for case in settings["cases"]:
                rows = [_row(row, found) for row in found if row["case"] == case]
                what = {
                    _MIXED: f"{options.tensors} tensors, {format_bytes(options.size)}, in rows",
                    _SMALL: f"{options.small} tensors of 32 B, the same on all ranks",
                    _SHARDS: f"{options.small} tensors in rows, 32 B of each on a rank",
                    _PLANNING: f"{options.planned} tensors in rows, 256 B of each on a rank",
                }[case]
                columns = _OF_MIXED if case == _MIXED else _OF_SMALL
                tables.append(Table(rows, columns, f"{ranks} rank{'s' * (ranks > 1)}: {what}"))
    caption = (
        f"medians of {options.runs} interleaved runs (least–greatest), times of the slowest rank; "
        "saves are durable, into an empty folder; loads begin with nothing in the page cache"
    )
    return Result("dcp", options.folder, caption, settings, tables)


def _row(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a rank told of a row, with its ratios to fio and to stock in the same rounds."""
    if row["problem"] is not None or not row["saves"]:
        return row
    case = [one for one in rows if one["case"] == row["case"] and not one["problem"]]
    stock_ = next((one for one in case if one["name"] == _STOCK), {})
    yardstick = next((one for one in case if one["name"].startswith("fio")), {})
    scale = row["bytes"] / yardstick["bytes"] if yardstick else 1.0
    return {
        **row,
        "seconds": Spread.of(row["saves"]),
        "plan_seconds": Spread.of(row["plans"]) if row["plans"] else None,
        "load_seconds": Spread.of(row["loads"]),
        "bytes_per_second": Spread.of(row["bytes"] / one for one in row["saves"]),
        "to_fio": ratio(row["saves"], yardstick.get("saves"), scale),
        "to_stock": ratio(row["saves"], stock_.get("saves")),
        "plan_to_stock": ratio(row["plans"], stock_.get("plans")),
        "load_to_fio": ratio(row["loads"], yardstick.get("loads"), scale),
        "load_to_stock": ratio(row["loads"], stock_.get("loads")),
    }


# -- kinds of save and load ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """Storage and planners.

    Attributes:
        writer, reader: make the storage for a folder.
        save_planner, load_planner: make planners.
        around: what is in force meanwhile.
        synced: the writer syncs its folder, too.
        anew: each save is planned as the first one is.
    """

    name: str
    writer: Callable[[Path], Any]
    reader: Callable[[Path], Any]
    save_planner: Callable[[], Any]
    load_planner: Callable[[], Any]
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    synced: bool = True
    anew: bool = False

    def save(self, state: dict[str, Any], folder: Path, group: Any, wait_for_plans: bool) -> float:
        """Save, on all ranks of a group; return the seconds until data were to be written.

        Args:
            wait_for_plans: no rank writes before all have planned: with fewer cores than ranks
                those that write would keep others from planning.
        """
        planned: list[float] = []
        writer = self.writer(folder)
        write_data = writer.write_data

        def when_planned(*args: Any) -> Any:
            planned.append(time.perf_counter() - began)
            if wait_for_plans:
                dist.barrier(group)
            return write_data(*args)

        writer.write_data = when_planned
        with self.around(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            planner = self.save_planner()
            save(state, storage_writer=writer, planner=planner, process_group=group)
        if not self.synced and dist.get_rank() == 0:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        return planned[0]

    def load(self, state: dict[str, Any], folder: Path) -> None:
        """Load into a state, on all ranks."""
        with self.around(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(state, storage_reader=self.reader(folder), planner=self.load_planner())


def _kinds(case: str) -> list[_Kind]:
    if case == _MIXED:
        return [
            _stock_kind(_STOCK),
            _stock_kind(f"{_STOCK}, 2 threads", thread_count=2),
            _stock_kind(f"{_STOCK}, CRC off", crc=False),
            _stock_kind(f"{_STOCK}, 2 threads, CRC off", crc=False, thread_count=2),
            _stock_kind(f"{_STOCK}, copies ahead", per_thread_copy_ahead=_COPY_AHEAD),
            _our_kind(),
        ]
    if case != _PLANNING:
        return [_stock_kind(_STOCK), _our_kind(anew=True), _our_kind()]
    kinds = [_stock_kind(_STOCK)]
    if "enable_plan_caching" in inspect.signature(DefaultSavePlanner).parameters:
        caching = partial(DefaultSavePlanner, enable_plan_caching=True)
        kinds.append(_stock_kind(f"{_STOCK}, plan caching", planner=caching))
    return [*kinds, _our_kind(anew=True), _our_kind()]


def _our_kind(anew: bool = False) -> _Kind:
    return _Kind(
        f"fastserial{', first save' * anew}",
        FastStorageWriter,
        FastStorageReader,
        FastSavePlanner,
        FastLoadPlanner,
        anew=anew,
    )


def _stock_kind(
    name: str,
    crc: bool = True,
    planner: Callable[[], Any] = DefaultSavePlanner,
    **settings: Any,
) -> _Kind:
    return _Kind(
        name,
        lambda path: FileSystemWriter(path, **settings),
        FileSystemReader,
        planner,
        DefaultLoadPlanner,
        around=lambda: stock_with(crc),
        synced=False,
    )


# -- one rank ------------------------------------------------------------------------------------


def _worker() -> None:
    bench = start()
    rows: list[dict[str, Any]] = []
    for case in bench["cases"]:
        rows += _Case(bench, case).run()
    finish(rows)


class _Case:
    """Saves and loads of one state, in turn by each kind."""

    def __init__(self, bench: dict[str, Any], case: str) -> None:
        self._bench, self._case = bench, case
        self._folder = Path(bench["folder"])
        self._state = _state_of(case, bench)
        self._target = {**self._state, "step": 0}
        self._target["model"] = {name: _blank(one) for name, one in self._state["model"].items()}
        self._fio = None
        jobs = dist.get_world_size()
        if case == _MIXED and bench["with_fio"]:
            self._fio = best_fio(self._folder, bench["nbytes"], jobs, bench["pause"])
        self._kinds: dict[str, _Kind | None] = {fio_name(jobs): None} if self._fio else {}
        self._kinds |= {kind.name: kind for kind in _kinds(case)}
        gc.collect()
        gc.freeze()  # there is one before each run, and the compiler's modules would be its most

    def run(self) -> list[dict[str, Any]]:
        """Return the rows."""
        rows = {name: self._empty(name) for name in self._kinds}
        for turn in range(self._bench["runs"] + 1):  # the first is a warm-up
            for name, kind in self._kinds.items():
                if rows[name]["problem"] is None:
                    self._run(kind, rows[name], counts=turn > 0)
        return list(rows.values())

    def _empty(self, name: str) -> dict[str, Any]:
        row = {"name": name, "case": self._case, "saves": [], "plans": [], "loads": [], "bytes": 0}
        rest = {"save_extra_bytes": None, "load_extra_bytes": None, "equal": None, "problem": None}
        return {**row, **rest}

    def _run(self, kind: _Kind | None, row: dict[str, Any], counts: bool) -> None:
        folder = fresh(self._folder / "row", self._bench["pause"])
        group = None
        if kind is not None and kind.anew:  # plans are kept with the group
            group = dist.new_group(backend="gloo")
            dist.barrier(group)
        waits = self._case == _PLANNING
        done, row["problem"] = everywhere(
            partial(self._with_fio, folder / "fio", True)
            if kind is None
            else partial(kind.save, self._state, folder, group, waits)
        )
        if row["problem"] is not None:
            return
        if counts:
            row["saves"].append(slowest(done))
            planned = [one.value for one in done if one.value is not None]
            row["plans"] += [max(planned)] if planned else []
            if kind is not None:
                row["save_extra_bytes"] = highest(row["save_extra_bytes"], done)
        if dist.get_rank() == 0:
            self._before_a_load(folder, row)
        self._target["step"] = 0
        for tensor in self._target["model"].values():
            _local(tensor).zero_()
        done, row["problem"] = everywhere(
            partial(self._with_fio, folder / "fio", False)
            if kind is None
            else partial(kind.load, self._target, folder)
        )
        if row["problem"] is None:
            self._after_a_load(kind, row, done, counts)

    def _before_a_load(self, folder: Path, row: dict[str, Any]) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        row["bytes"] = sum(path.stat().st_size for path in files)
        chill(files)
        settle(self._bench["pause"])
        fetch_free_memory(row["bytes"])

    def _after_a_load(
        self, kind: _Kind | None, row: dict[str, Any], done: list[Done], counts: bool
    ) -> None:
        if counts:
            row["loads"].append(slowest(done))
        if kind is None:
            return
        if counts:
            row["load_extra_bytes"] = highest(row["load_extra_bytes"], done)
        equal: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(equal, _same(self._state, self._target))
        row["equal"] = all(equal) and row["equal"] is not False

    def _with_fio(self, path: Path, writes: bool) -> Sample:
        if dist.get_rank() or self._fio is None:
            return Sample(0, 0.0, 0.0)
        jobs = dist.get_world_size()
        if writes:
            return fio.run_fio(self._fio[0], path, self._bench["nbytes"], jobs)
        return fio.read_file(self._fio[1], path, jobs)


def _state_of(case: str, bench: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's state. Those of a case are equal in each run."""
    ranks = dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    # A small state is the same on all ranks; of the others each has its rows.
    generator = torch.Generator().manual_seed(0 if case == _SMALL else dist.get_rank())

    def rows(count: int, width: int) -> DTensor:
        local = torch.empty(count, width)
        fill(local, generator)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    tensors: list[torch.Tensor]
    if case == _MIXED:
        unit = ranks * _WIDTH * torch.float32.itemsize
        sizes = tensor_sizes(bench["nbytes"], bench["tensors"])
        tensors = [rows(max(1, round(nbytes / unit)), _WIDTH) for nbytes in sizes]
    elif case == _SMALL:
        tensors = [torch.rand(_FEW, generator=generator) for _ in range(bench["small"])]
    elif case == _PLANNING:
        tensors = [rows(1, _WIDTH) for _ in range(bench["planned"])]
    else:
        tensors = [rows(1, _FEW) for _ in range(bench["small"])]
    return {"model": {f"layers.{i}.weight": one for i, one in enumerate(tensors)}, "step": 1}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two states are equal, bit by bit."""
    pairs = ((tensor, other["model"][name]) for name, tensor in one["model"].items())
    return one["step"] == other["step"] and all(
        torch.equal(_local(a).view(torch.int32), _local(b).view(torch.int32)) for a, b in pairs
    )


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor)
    local = torch.zeros_like(tensor.to_local())
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        _worker()
    brief = {"ranks": [2], "size": 32 << 20, "small": 100, "planned": 100, "runs": 1}
    script = Script(__doc__, "half an hour", {**brief, "no_fio": True}, Picture())
    script.add("--ranks", type=int, nargs="+", help="processes; default 1, then 2, then 4")
    script.add("--case", choices=_CASES, nargs="+", help="only these")
    script.add("--size", type=size, default=1 << 30, help="of the state of mixed sizes")
    script.add("--tensors", type=int, default=300, help="of mixed sizes")
    script.add("--small", type=int, default=3000, help="tensors of 32 B in the small states")
    script.add("--planned", type=int, default=4000, help="tensors that are planned")
    script.add("--no-fio", action="store_true", help="without fio")
    script.run(_measure)
