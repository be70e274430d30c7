"""A rank: saves again and again until another one is killed. Arguments: folder, who.

`who` is `one` (one file), `clones` (the same, from the file before), `dcp` (a folder of
torch.distributed.checkpoint), `stock` (the same by stock's storage), or `unguarded`: `dcp`, with
names that are not new. In the file `flags` of the folder it says, a byte for each rank, that it is
in a save. Prints whom the error names, and how long it took.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed
from fastserial.distributed import FastSavePlanner, FastStorageWriter
from fastserial.distributed.dcp.folder import ShardFolder


def save(state: dict[str, Any], out: Path, who: str) -> None:
    if who == "one":
        distributed.save(state, out / "file.pt", timeout=20)
    elif who == "clones":
        report = distributed.save(state, out / "file.pt", timeout=20, base=out / "file.pt")
        frozen = state["frozen"].nbytes if state["step"] > 1 and report.ranks else 0
        assert report.cloned >= frozen - (1 << 18), report  # but what travels between the ranks
    elif who == "stock":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(out))
    else:
        dcp.save(state, storage_writer=FastStorageWriter(out), planner=FastSavePlanner())


def main() -> None:
    rank, count = join()
    folder, who = Path(sys.argv[1]), sys.argv[2]
    with (folder / "flags").open("r+b") as file:
        flags = mmap.mmap(file.fileno(), count)
    if who == "unguarded":
        ShardFolder.new_shard = lambda _, prefix: f"{prefix}0.distcp"  # type: ignore[method-assign]
    mesh = DeviceMesh("cpu", torch.arange(count))
    rows, columns, whole = torch.zeros(1 << 18, 4), torch.zeros(1 << 20, 1), torch.zeros(1 << 20)
    state: dict[str, Any] = {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "columns": DTensor.from_local(columns, mesh, [Shard(1)], run_check=False),
        "all": whole,
        "step": 0,
    }
    if who == "clones":
        state["frozen"] = torch.arange(1 << 21)
    while True:
        state["step"] += 1
        for tensor in (rows, columns, whole):
            tensor += 1
        began = time.monotonic()
        flags[rank] = 1
        try:
            save(state, folder / "out", who)
        except AssertionError:
            raise
        except Exception as error:  # ours; gloo's, of a connection that broke, or DCP's of that
            print(getattr(error, "rank", None), time.monotonic() - began)
            return
        flags[rank] = 0


main()
