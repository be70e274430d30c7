"""A rank: prints how much more memory a save took at its peak (bytes). Arguments: folder, MiB."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from support.peaks import peak
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed


def main() -> None:
    _, count = join()
    folder, mib = Path(sys.argv[1]), int(sys.argv[2])
    mesh = DeviceMesh("cpu", torch.arange(count))
    rows = mib * 2**20 // 4 // 1024 // count
    state = {
        "rows": DTensor.from_local(torch.ones(rows, 1024), mesh, [Shard(0)], run_check=False),
        "columns": DTensor.from_local(
            torch.ones(rows * count, 1024 // count), mesh, [Shard(1)], run_check=False
        ),
        "all": torch.ones(rows, 1024),
    }
    small = {"x": DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False)}
    distributed.save(small, folder / "small.pt", timeout=60)
    print(peak(lambda: distributed.save(state, folder / "file.pt", timeout=60)))


main()
