"""A rank: how much memory a load takes besides the targets. Arguments: a folder, MiB of state.

Prints the most bytes that the process had during each load, less those it had before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.peaks import peak
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, ones

import fastserial
from fastserial.distributed import load

_MiB = 2**20
_TENSORS = 4


def main() -> None:
    rank, count = join()
    path, mib = Path(sys.argv[1]) / "state.pt", int(sys.argv[2])
    shape = (mib * _MiB // _TENSORS // 2 // 2048, 2048)
    if rank == 0:
        with path.open("wb") as file, fastserial.options(durable=False):
            one = torch.arange(shape[0] * shape[1], dtype=torch.int32).to(torch.bfloat16)
            torch.save({str(n): one.view(shape).clone() for n in range(_TENSORS)}, file)
    dist.barrier()
    mesh = DeviceMesh("cpu", torch.arange(count))
    taken: dict[str, int] = {}
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("all", Replicate())):
        for dtype in (torch.bfloat16, torch.float32):
            into: dict[str, Any] = {
                str(n): ones(*shape, dtype=dtype, device_mesh=mesh, placements=[placement])
                for n in range(_TENSORS)
            }
            dist.barrier()
            taken[f"{name} {dtype}"] = peak(lambda into=into: load(path, into, cast=True))
            wanted = torch.arange(shape[1], dtype=torch.int32).to(dtype)
            found = into["3"].full_tensor()[0]
            assert torch.equal(found, wanted.bfloat16().to(dtype))
            del into
    print(taken)


main()
