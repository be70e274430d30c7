"""A rank: prints the phases of saves of many tensors (JSON). Arguments: folder, tensors, saves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed, last_save_report


def main() -> None:
    _, count = join()
    mesh = DeviceMesh("cpu", torch.arange(count))
    tensors, saves = int(sys.argv[2]), int(sys.argv[3])
    state = {
        f"layers.{index // 10}.weight.{index % 10}": DTensor.from_local(
            torch.ones(16, 64), mesh, [Shard(0)], run_check=False
        )
        for index in range(tensors)
    }
    for step in range(saves):
        distributed.save({"state": state, "step": step}, Path(sys.argv[1]) / "f.pt", timeout=60)
        report = last_save_report()
        assert report is not None
        print(json.dumps([report.seconds, report.phases]))


main()
