"""One file from many ranks, beside fio with as many jobs, a gather, and DCP with consolidation.

Every row writes a new file into an empty folder, and ends when the file and its directory entry are
on the device, on the slowest rank. Before a row of fastserial there is an untimed save of its kind:
a job keeps the plan from one save to the next. Exit status 1 if a file differs from that of the
gather and stock torch.save.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from common import Picture, Say, Script, size
from ranks import (
    WORKER,
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
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed, last_save_report
from fastserial.bench import fio
from fastserial.bench.measure import MB, Sample
from fastserial.bench.payload import digest, fill, tensor_sizes
from fastserial.bench.state import check_memory, scratch
from fastserial.bench.table import Column, Result, Spread, Table, number, ratio, verdict
from fastserial.bench.table import size as shown
from fastserial.bench.torch_rows import stock, sync
from fastserial.reports import format_bytes

_GATHER = "gather + torch.save"
_OURS = "fastserial,"  # begins the names of our rows
_WIDTH = 64  # elements of a row of a tensor
_COPIES = 2  # of the state on the disk: a folder of DCP and the file made of it
_IN_MEMORY = 3  # the shards, what a gather makes of them, and its page cache
_PHASES = ("plan", "wait", "exchange", "write", "sync")
_COLUMNS = (
    Column("seconds", "seconds", number(1, 2)),
    Column("bytes_per_second", "MB/s", number(MB)),
    Column("to_fio", "× fio", number(1, 2)),
    Column("to_gather", "× gather", number(1, 2)),
    Column("extra_bytes", "extra memory", shown),
    Column("identical", "identical", verdict),
)


def _measure(options: argparse.Namespace, say: Say) -> Result:
    check_memory(_IN_MEMORY * options.size)
    writers = sorted({count for count in options.writers or (1, 2, 4) if count <= options.ranks})
    settings = {
        "nbytes": options.size,
        "tensors": options.tensors,
        "writers": writers,
        "runs": options.runs,
        "with_fio": not options.no_fio,
        "others": not options.no_others,
        "pause": options.pause,
    }
    with scratch(options.folder, _COPIES * options.size) as folder:
        say("saving in turn")
        found = run_ranks(__file__, {**settings, "folder": str(folder)}, options.ranks)
    runs = {row["name"]: row["runs"] for row in found}
    for row in found:
        row["to_fio"] = row["to_gather"] = None
        if row["runs"]:
            row["seconds"] = Spread.of(row["runs"])
            row["bytes_per_second"] = Spread.of(row["bytes"] / one for one in row["runs"])
            row["to_fio"] = ratio(row["runs"], runs.get(row["yardstick"]))
            row["to_gather"] = ratio(row["runs"], runs.get(_GATHER))
    caption = (
        f"{options.tensors} tensors, {format_bytes(options.size)}, in rows on {options.ranks} "
        f"ranks of one machine; medians of {options.runs} interleaved runs (least–greatest), all "
        "durable"
    )
    tables = [Table(found, _COLUMNS), *_of_ranks(found)]
    missing = {} if any("fio" in name for name in runs) else {"fio": "not installed, or --no-fio"}
    settings |= {"ranks": options.ranks}
    return Result("onefile", options.folder, caption, settings, tables, missing)


def _of_ranks(rows: list[dict[str, Any]]) -> list[Table]:
    """Return a table of what each rank did in the last row's run of median time."""
    told = [row for row in rows if row["ranks"]]
    if not told:
        return []
    row = told[-1]
    order = sorted(range(len(row["runs"])), key=row["runs"].__getitem__)
    lines = []
    for part in row["ranks"][order[len(order) // 2]]:
        phases = {name: part["phases"].get(name, 0.0) for name in _PHASES}
        moved = {name: part[name] for name in ("bytes", "sent_bytes", "received_bytes")}
        lines.append({"name": f"rank {part['rank']}", **moved, **phases})
    columns = [Column("bytes", "wrote", shown), Column("sent_bytes", "sent", shown)]
    columns += [Column("received_bytes", "received", shown)]
    columns += [Column(name, f"{name}, s", number(1, 3)) for name in _PHASES]
    return [Table(lines, columns, f"{row['name']}: the ranks")]


# -- one rank ------------------------------------------------------------------------------------


def _worker() -> None:
    bench = start()
    folder, pause = Path(bench["folder"]), bench["pause"]
    rows = {**_fio_rows(bench), **_rows(bench, _model(bench))}
    results = {name: _blank(name) for name in rows}
    stocks = ""
    for turn in range(bench["runs"] + 1):  # the first is a warm-up
        for name, save in rows.items():
            row = results[name]
            if row["problem"] is not None:
                continue
            if name.startswith(_OURS):
                save(fresh(folder / "row", pause) / "checkpoint.pt")
            path = fresh(folder / "row", pause) / "checkpoint.pt"
            done, problem = everywhere(partial(save, path))
            row["problem"] = problem
            if problem is not None:
                continue
            if turn:
                row["runs"].append(slowest(done))
                row["extra_bytes"] = highest(row["extra_bytes"], done)
                report = last_save_report()
                if name.startswith(_OURS) and report is not None:
                    row["ranks"].append([asdict(part) for part in report.ranks])
            if dist.get_rank():
                continue
            row["bytes"] = path.stat().st_size
            if "fio" in name:
                row["extra_bytes"] = None
            elif turn == 0 and name == _GATHER:
                stocks = digest(path)
            elif turn == 0 and stocks and name.startswith(_OURS):
                row["identical"] = digest(path) == stocks
    finish(list(results.values()))


def _blank(name: str) -> dict[str, Any]:
    """Return a row without results, to be compared with fio's of as many writers."""
    count = int(name.split()[1]) if name.startswith(_OURS) else 1
    row = {"name": name, "runs": [], "ranks": [], "bytes": 0, "yardstick": fio_name(count)}
    return {**row, "extra_bytes": None, "identical": None, "problem": None}


def _model(bench: dict[str, Any]) -> nn.Module:
    """Return a module of parameters in mixed sizes, each sharded in rows among all ranks."""
    world = dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(world))
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = nn.Module()
    unit = world * _WIDTH * torch.float32.itemsize
    for index, nbytes in enumerate(tensor_sizes(bench["nbytes"], bench["tensors"])):
        local = torch.empty(max(1, round(nbytes / unit)), _WIDTH)
        fill(local, generator)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        model.register_parameter(f"weight{index}", nn.Parameter(sharded))
    return model


def _rows(bench: dict[str, Any], model: nn.Module) -> dict[str, Callable[[Path], Any]]:
    rows: dict[str, Callable[[Path], Any]] = {}
    if bench["others"]:
        rows[_GATHER] = partial(_gather, model)
        rows["DCP save + consolidation"] = partial(_dcp, model)
    for count in bench["writers"]:
        rows[f"{_OURS} {count} writer{'s' * (count > 1)}"] = partial(_save, model, count)
    return rows


def _save(model: nn.Module, writers: int, path: Path) -> None:
    distributed.save(model, path, writers=writers)


def _gather(model: nn.Module, path: Path) -> None:
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        with stock():
            torch.save(state, path)
        sync(path)
    dist.barrier()


def _dcp(model: nn.Module, path: Path) -> None:
    checkpoint: Any = torch.distributed.checkpoint
    folder = path.with_suffix(".dcp")
    with stock(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
        if dist.get_rank() == 0:
            dcp_to_torch_save(folder, path)
            sync(path)
    dist.barrier()


def _fio_rows(bench: dict[str, Any]) -> dict[str, Callable[[Path], Any]]:
    """Return rows of fio's best settings, with as many jobs as there are writers."""
    best = None
    if bench["with_fio"]:
        best = best_fio(Path(bench["folder"]), bench["nbytes"], 1, bench["pause"])
    if best is None:
        return {}

    def run(jobs: int, path: Path) -> Sample:
        if dist.get_rank():
            return Sample(0, 0.0, 0.0)
        return fio.run_fio(best[0], path, bench["nbytes"], jobs)

    return {fio_name(jobs): partial(run, jobs) for jobs in sorted({1, *bench["writers"]})}


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        _worker()
    brief = {"ranks": 2, "size": 32 << 20, "runs": 1, "no_fio": True}
    script = Script(__doc__, "ten minutes for each GiB", brief, Picture())
    script.add("--ranks", type=int, default=4, help="processes on this machine")
    script.add("--size", type=size, default=1 << 30, help="of the whole state")
    script.add("--tensors", type=int, default=300, help="of mixed sizes")
    script.add("--writers", type=int, nargs="+", help="ranks that write; default 1, 2, 4")
    script.add("--no-fio", action="store_true", help="without fio")
    script.add("--no-others", action="store_true", help="without a gather, and DCP")
    script.run(_measure)
