"""A rank of runs that are saved before their first step, and gone on with.

`FOLDER ddp|fsdp OPTIMIZER...`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from support.sharded import parallel
from support.unstepped import Run
from torch.nn.parallel import DistributedDataParallel

import fastserial
from fastserial import distributed


def main() -> None:
    join()
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)

    def wrap(net: Any) -> Any:
        if kind == "ddp":
            return DistributedDataParallel(net, find_unused_parameters=True)
        return parallel(net, kind)

    for name in sys.argv[3:]:
        expected = Run(name, wrap).steps(4)
        run = Run(name, wrap)
        path = folder / f"{name}.pt"
        distributed.save(run.state, path)
        assert not torch.load(path)["optimizer"]["state"]
        with fastserial.Checkpointer(folder / name, run.state, rng=False) as checkpointer:
            checkpointer.save(0)
            done = run.steps(2)
            checkpointer.save(2)
        assert done + run.steps(4) == expected, name
        for step in (0, 2):
            again = Run(name, wrap)
            with fastserial.Checkpointer(folder / name, again.state, rng=False) as checkpointer:
                assert checkpointer.resume(step) == step
            assert again.steps(4) == expected[step:], (name, step)
        again = Run(name, wrap)
        distributed.load(path, again.state)
        assert again.steps(4) == expected, name
    print("same")
    dist.barrier()


main()
