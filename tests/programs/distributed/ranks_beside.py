"""A rank: saves beside a training loop that changes everything while it is saved.

Arguments: folder, kind of model, trials, seed, and `uncopied` for the loop without copies, which
ends with the first wrong file. Prints how many files were saved and wrong.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.hostile import OPTIONS, Hostile, layers, without_copies
from support.ranks import join
from support.sharded import parallel

import fastserial
from fastserial import distributed

WIDTH = 520  # a weight has more than 1 MiB: every rank writes a part of it


def main() -> None:
    rank, _ = join()
    folder, kind, trials, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    uncopied = sys.argv[5:] == ["uncopied"]
    if uncopied:
        without_copies(pytest.MonkeyPatch())
    torch.manual_seed(1)
    model = layers(WIDTH)
    model = parallel(model, kind, model[0], model[2])
    dice = random.Random(seed)
    way = dice.choice([{"foreach": True}, {"fused": True}, {"foreach": False}])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **way)
    with fastserial.options(**OPTIONS):
        loop = Hostile(
            *(folder, model, optimizer, dice),
            save=lambda objects, path: distributed.save(objects, path, timeout=60),
            begin=lambda objects, path, budget: distributed.save_async(
                objects, path, snapshot_budget=budget, timeout=60
            ),
            moments=random.Random(seed + rank),
        )
        for _ in range(trials):
            loop.save()
            dist.barrier()
            assert {found.name for found in loop.path.parent.iterdir()} <= {"state.pt"}
            wrong = torch.tensor([loop.counts["wrong"]])
            dist.broadcast(wrong, 0)
            if uncopied and wrong.item():
                break
    print({name: loop.counts[name] for name in ("saved", "wrong")})


main()
