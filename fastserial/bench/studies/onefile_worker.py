"""One rank of `fastserial bench onefile`: a program of its own, started by the benchmark.

Every row begins from the same state: no file of a row before is left, no page is dirty, malloc's
free memory is the kernel's. It writes a new file, and ends when the file and its directory entry
are on the device, on the slowest rank. Before a row of ours there is an untimed save of its kind: a
job keeps the plan from one save to the next.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed, last_save_report
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import digest
from fastserial.bench.measuring.measure import Sample, Usage, measure
from fastserial.bench.measuring.ranks import MARK
from fastserial.bench.measuring.settle import settle
from fastserial.bench.studies.onefile_plan import GATHER, OURS, OneFileBench, RowResult, fio_name
from fastserial.bench.subjects import fio
from fastserial.bench.subjects.payload import fill, tensor_sizes
from fastserial.bench.subjects.saving import stock, sync

__all__: list[str] = []

_WIDTH = 64  # elements of a row
_TIMEOUT = timedelta(hours=1)  # while rank 0 looks for fio's best
_NAME = "checkpoint.pt"

# Writes a file; returns the seconds if it knows better than whoever calls it.
Row = Callable[[Path], float | None]


def main() -> None:
    """Measure, and let rank 0 print the results as JSON."""
    bench = OneFileBench(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rows = {**_fio_rows(bench), **_rows(bench, _model(bench))}
    results = {name: _result(name, rows) for name in rows}
    stocks = ""
    for turn in range(bench.runs + 1):  # the first is a warm-up
        for name, row in rows.items():
            result = results[name]
            if result.problem is not None:
                continue
            if name.startswith(OURS):
                row(_fresh(bench))
            path = _fresh(bench)
            _run(row, path, result, counts=turn > 0)
            if turn == 0 and dist.get_rank() == 0 and result.problem is None:
                if name == GATHER:
                    stocks = digest(path)
                elif stocks and name.startswith(OURS):
                    result.identical = digest(path) == stocks
    if dist.get_rank() == 0:
        text = json.dumps([asdict(result) for result in results.values()])
        sys.stdout.write(f"\n{MARK}{text}\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def _result(name: str, rows: Collection[str]) -> RowResult:
    """Return a row without results, to be compared with fio's of as many writers."""
    count = int(name.split()[1]) if name.startswith(OURS) else 1
    yardstick = fio_name(count)
    return RowResult(name, yardstick=yardstick if yardstick in rows else None)


def _model(bench: OneFileBench) -> nn.Module:
    """Return a module of parameters in mixed sizes, each sharded in rows among all ranks."""
    mesh = DeviceMesh("cpu", torch.arange(bench.ranks))
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = nn.Module()
    unit = bench.ranks * _WIDTH * torch.float32.itemsize
    for index, nbytes in enumerate(tensor_sizes(bench.nbytes, bench.tensors)):
        local = torch.empty(max(1, round(nbytes / unit)), _WIDTH)
        fill(local, generator)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        model.register_parameter(f"weight{index}", nn.Parameter(sharded))
    return model


def _rows(bench: OneFileBench, model: nn.Module) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    if bench.others:
        rows[GATHER] = lambda path: _gather(model, path)
        rows["DCP save + consolidation"] = lambda path: _dcp(model, path)
    for count in bench.writers:
        name = f"{OURS} {count} writer{'s' * (count > 1)}"
        rows[name] = lambda path, count=count: _save(model, path, count)  # type: ignore[misc]
    return rows


def _save(model: nn.Module, path: Path, writers: int) -> None:
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
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    checkpoint: Any = torch.distributed.checkpoint
    folder = path.with_suffix(".dcp")
    with stock(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
        if dist.get_rank() == 0:
            dcp_to_torch_save(folder, path)
            sync(path)
    dist.barrier()


def _fio_rows(bench: OneFileBench) -> dict[str, Row]:
    """Return rows of fio's best variant, with as many jobs as there are writers."""
    found: list[Any] = [None]
    if bench.with_fio and dist.get_rank() == 0 and fio.installed():
        with contextlib.suppress(BenchError):
            found = [_best(bench)]
    dist.broadcast_object_list(found)
    variant = found[0]
    if variant is None:
        return {}

    def row(jobs: int) -> Row:
        def run(path: Path) -> float:
            if dist.get_rank():
                return 0.0
            return fio.run_fio(variant, path, bench.nbytes, jobs).seconds

        return run

    return {fio_name(jobs): row(jobs) for jobs in sorted({1, *bench.writers})}


def _best(bench: OneFileBench) -> fio.FioVariant:
    """Return fio's fastest variant with one job.

    Raises:
        BenchError: fio cannot write there.
    """
    path = Path(bench.folder) / "fio"
    speeds: dict[fio.FioVariant, float] = {}

    def once(variant: fio.FioVariant) -> Sample:
        settle(bench.pause)
        try:
            sample = fio.run_fio(variant, path, bench.nbytes)
        finally:
            path.unlink(missing_ok=True)
        speeds[variant] = sample.bandwidth
        return sample

    return max(fio.best_variants(once), key=speeds.__getitem__)


def _fresh(bench: OneFileBench) -> Path:
    """Return where the next file goes, when nothing is left of the last one. Collective."""
    dist.barrier()
    folder = Path(bench.folder) / "row"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        settle(bench.pause)
    dist.barrier()
    return folder / _NAME


def _run(row: Row, path: Path, result: RowResult, counts: bool) -> None:
    """Run a row on all ranks; the slowest one counts."""
    known: list[float] = []
    problem = None
    used = Usage(0.0, 0.0, None)
    try:
        used = measure(lambda: known.append(_seconds(row, path)))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    own = (known[0] if known else 0.0, used.extra_bytes, problem)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    result.problem = next((text for _, _, text in told if text), None)
    if result.problem is not None or not counts:
        return
    result.seconds.append(max(seconds for seconds, _, _ in told))
    if dist.get_rank() == 0:
        result.nbytes = path.stat().st_size
    peaks = [extra for _, extra, _ in told if extra is not None]
    result.extra_bytes = max([*peaks, result.extra_bytes or 0], default=None)
    report = last_save_report()
    if result.name.startswith(OURS) and report is not None:
        result.parts.append([asdict(part) for part in report.ranks])


def _seconds(row: Row, path: Path) -> float:
    """Run a row; return its seconds from when all ranks are ready: they get there one by one."""
    dist.barrier()
    began = perf_counter()
    found = row(path)
    return found if found is not None else perf_counter() - began


if __name__ == "__main__":
    main()
