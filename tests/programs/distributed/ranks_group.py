"""A rank of three: saves from a group of two, twice with a new process group. Arguments: folder.

Also by FastPersist's function, with its number of writers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.ranks import join
from support.sharded import noise, split
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fastserial import distributed, last_save_report
from fastserial.integrations.fastpersist import fastpersist_save


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = join()
    for turn in range(2):
        group = dist.new_group([1, 2])
        if rank:
            full = noise([301, 400], torch.float32, turn)
            mesh = DeviceMesh.from_group(group, "cpu")
            leaf = split(full, mesh, [Shard(0)])
            path = folder / "file.pt"
            distributed.save({"w": leaf, "turn": turn}, path, group=group, timeout=30)
            if rank == 1:  # which is rank 0 of the group
                stock = folder / "stock" / "file.pt"
                stock.parent.mkdir(exist_ok=True)
                torch.save({"w": full, "turn": turn}, stock)
                assert path.read_bytes() == stock.read_bytes()
                report = last_save_report()
                assert report is not None
                assert [part.rank for part in report.ranks] == [0, 1]
            state = {"w": leaf, "turn": turn}
            for writers in (1, 2):
                name = folder / f"{writers}" / "file.pt"
                name.parent.mkdir(exist_ok=True)
                found = fastpersist_save(
                    state, name, show_stats=False, num_parallel_writers=writers, group=group
                )
                assert name.read_bytes() == path.read_bytes()
                assert found["total_bytes"] == path.stat().st_size
                assert 0 < found["write_secs"] <= found["total_secs"]
                if rank == 1:
                    report = last_save_report()
                    assert report is not None
                    assert sum(part.bytes > 0 for part in report.ranks) == writers
        dist.barrier()
        dist.destroy_process_group()
        os.environ["FASTSERIAL_TEST_STORE"] += "again"
        if turn == 0:
            join()
    print("done")


main()
