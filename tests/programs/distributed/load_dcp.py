"""A rank of two: `distributed.load` of a DCP folder.

Arguments: folder, who saves (`ours`, `stock`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastserial
from fastserial import CorruptCheckpointError, DistributedError, LoadMismatchError, distributed
from fastserial.distributed import FastSavePlanner, FastStorageWriter, FlatShard


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else bool(a == b)


def main() -> None:
    rank, count = join()
    path, who = Path(sys.argv[1]), sys.argv[2]
    mesh = DeviceMesh("cpu", torch.arange(count))
    model, optimizer = trained()
    full = torch.arange(7 * 600.0).view(7, 600)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rows": distribute_tensor(full, mesh, [Shard(0)]),
        "columns": distribute_tensor(full.bfloat16(), mesh, [Shard(1)]),
        "step": 7,
        "list": [1, {"a": torch.ones(3)}],
        "rng": (torch.arange(4), 3),
    }
    ours = who == "ours"
    writer: Any = FastStorageWriter(path) if ours else dcp.FileSystemWriter(path)
    dcp.save(state, storage_writer=writer, planner=FastSavePlanner() if ours else None)

    into_model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 10))
    into: dict[str, Any] = {
        "model": into_model,
        "optimizer": torch.optim.AdamW(into_model.parameters()),
        "rows": distribute_tensor(torch.zeros(7, 600), mesh, [Shard(1)]),
        "columns": FlatShard((7, 600), torch.float32, 2000 * rank, 2000, torch.zeros(2000)),
        "step": 0,
        "list": [0, {"a": distribute_tensor(torch.zeros(3), mesh, [Replicate()])}],
        "rng": (distribute_tensor(torch.zeros(4, dtype=torch.int64), mesh, [Shard(0)]), 0),
    }
    with fastserial.options(verify_on_load=True):
        report = distributed.load(path, into, strict=True, cast=True)
    assert same(into_model.state_dict(), model.state_dict())
    assert same(into["optimizer"].state_dict(), optimizer.state_dict())
    assert torch.equal(into["rows"].full_tensor(), full)
    part = full.bfloat16().float().flatten()[2000 * rank : 2000 * rank + 2000]
    assert torch.equal(into["columns"].tensor, part)
    assert into["step"] == 7
    assert into["list"][0] == 1
    assert torch.equal(into["list"][1]["a"].to_local(), torch.ones(3))
    assert torch.equal(into["rng"][0].full_tensor(), torch.arange(4))
    assert into["rng"][1] == 3
    assert report.container == "dcp"
    assert report.verified
    assert [line.rank for line in report.ranks] == [0, 1]

    into["rows"] = distribute_tensor(torch.zeros(7, 601), mesh, [Shard(1)])
    into["more"] = torch.zeros(3)
    del into["step"]
    try:
        distributed.load(path, into, cast=True)
    except LoadMismatchError as error:
        for text in ("rows: its shape", "not in the file: more", "only in the file: step"):
            assert text in str(error), error
    else:
        raise AssertionError("a state that does not fit was loaded")
    for verify, strict in ((rank == 0, True), (False, rank == 0), (False, rank == 1)):
        try:
            with fastserial.options(verify_on_load=verify):
                distributed.load(path, {"step": 0}, strict=strict, timeout=60)
        except LoadMismatchError as error:
            assert "strict and verify_on_load are not the same on all ranks" in str(error)
        else:
            raise AssertionError("ranks with different options loaded")
    try:  # rank 0 decides what the path is
        distributed.load(path if rank == 0 else path / "none", {"step": 0}, timeout=60)
    except FileNotFoundError as error:
        assert isinstance(error, DistributedError)
        assert error.rank == 1
    dist.barrier()
    if rank == 0:
        with (path / "__1_0.distcp").open("r+b") as file:
            file.seek(file.seek(0, 2) - 12_000)
            file.write(b"damaged!" * 1000)
    dist.barrier()
    del into["more"]
    into["rows"] = distribute_tensor(torch.zeros(7, 600), mesh, [Shard(1)])
    with fastserial.options(verify_on_load=True):
        try:
            distributed.load(path, {**into, "step": 0}, cast=True)
        except CorruptCheckpointError as error:
            assert "record " in str(error), error
            print("damaged")


main()
