"""A rank: saves beside a training loop that changes everything while it is saved.

Arguments: folder, kind of model, trials, seed, and `uncopied` for the loop without copies, which
ends with the first wrong file.
Prints on rank 0 how many files were saved and wrong.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastserial
from fastserial import distributed
from fastserial.engines.threads import ThreadsEngine
from fastserial.errors import DistributedError
from fastserial.overlap.snapshot import Snapshot

WIDTH = 520  # a weight has more than 1 MiB: every rank writes a part of it


class Unsteady(ThreadsEngine):
    """Takes its time now and then, so that saves of a few MB last."""

    name = "unsteady"

    def submit(self, requests: Any) -> None:
        if random.random() < 0.5:
            time.sleep(0.02)
        super().submit(requests)


class Counting(nn.Module):
    """Has a buffer that each forward pass changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(300_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x


def made(kind: str, count: int) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
    model = nn.Sequential(*layers)
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (count,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Loop:
    """One model and optimizer, saved again and again. All ranks throw the same dice."""

    def __init__(self, folder: Path, kind: str, seed: int, rank: int, count: int) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        self.moments = random.Random(seed + rank)  # each rank's own
        self.rank = rank
        self.model = made(kind, count)
        way = self.dice.choice([{"foreach": True}, {"fused": True}, {"foreach": False}])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **way)
        self.loose = torch.zeros(400_000)
        self.counts: Counter[str] = Counter()
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            self.loose.add_(1)

    def disturb(self) -> None:
        """Change one thing without telling anyone; on all ranks the same."""
        model = getattr(self.model, "module", self.model)
        things = [
            lambda: self.loose.add_(1),
            lambda: model[0].weight.mul_(1.5),
            lambda: model[2].bias.add_(1),
            lambda: self.loose.untyped_storage().resize_(0) and None,
            lambda: model[1].seen.zero_(),
        ]
        with torch.no_grad():
            self.dice.choice(things)()
        if not self.loose.untyped_storage().nbytes():
            self.loose.untyped_storage().resize_(1_600_000)
            self.loose.fill_(7)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loose": self.loose}

    def save(self) -> None:
        """Save once, and meanwhile train or change what there is."""
        expected = self.folder / "expected" / "state.pt"
        path = self.folder / "at" / "state.pt"
        distributed.save(self.objects, expected, timeout=60)
        disturb = self.dice.random() < 0.4
        budget = self.dice.choice([None, 0, 1_000_000, 50_000_000])
        saving = distributed.save_async(self.objects, path, snapshot_budget=budget, timeout=60)
        for _ in range(self.dice.randrange(4)):
            time.sleep(self.moments.choice([0, 0, 0.002, 0.02]))
            if disturb:
                self.disturb()
            else:
                self.step()
        try:
            saving.wait(100)
        except DistributedError as error:  # only without copies
            assert "StorageChangedError" in error.cause, error
            return
        if self.rank == 0:
            same = path.read_bytes() == expected.read_bytes()
            self.counts["saved" if same else "wrong"] += 1


def main() -> None:
    rank, count = join()
    folder, kind, trials, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    uncopied = sys.argv[5:] == ["uncopied"]
    if uncopied:
        Snapshot.take = lambda self, parts: None  # type: ignore[method-assign]
    for name in ("at", "expected"):
        (folder / name).mkdir(exist_ok=True)
    options = {"small_file": 65536, "block_size": 65536, "queue_depth": 2, "durable": False}
    with fastserial.options(engine=Unsteady, **options):
        loop = Loop(folder, kind, seed, rank, count)
        for _ in range(trials):
            loop.save()
            left = [found.name for found in (folder / "at").iterdir() if found.name != "state.pt"]
            dist.barrier()
            assert not left, left
            wrong = torch.tensor([loop.counts["wrong"]])
            dist.broadcast(wrong, 0)
            if uncopied and wrong.item():
                break
    print({name: loop.counts[name] for name in ("saved", "wrong")})


main()
