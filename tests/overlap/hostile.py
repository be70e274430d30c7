"""A training loop that changes everything while it is being saved, at random moments."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.beside import OPTIMIZERS
from torch import nn

import fastserial
from fastserial.checkpoints.save import write as save_now
from fastserial.training.objects import state_of, states

_WIDTH = 400  # a weight has 625 KiB: more than is copied in any case


class _Counting(nn.Module):
    """Has a large buffer that each forward pass changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(40_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.detach().mean())
        return x


@dataclass
class Outcome:
    """What became of the saves.

    Attributes:
        counts: of saved, and WRONG (the file is not the state at the call).
        kinds: of the snapshots.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)


class Hostile:
    """One model and optimizer, saved again and again."""

    def __init__(self, folder: Path, optimizer: str, dice: random.Random) -> None:
        self.dice = dice
        self.outcome = Outcome()
        self.path = folder / "at" / "state.pt"
        self.expected = folder / "expected" / "state.pt"
        for path in (self.path, self.expected):
            path.parent.mkdir(exist_ok=True)
        layers = [nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), _Counting()]
        self.model = nn.Sequential(*layers, nn.Linear(_WIDTH, _WIDTH))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.loose = torch.zeros(50_000)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, _WIDTH)).square().mean().backward()
        self.optimizer.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loose": self.loose}

    def _resize(self) -> None:
        size = self.dice.choice([0, 40_000, 50_000, 60_000])
        self.loose.resize_(size).fill_(self.dice.random())

    def _move(self) -> None:
        """Free the storage, and make it anew, as FSDP does."""
        storage = self.loose.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes + self.dice.choice([0, 4096]))
        self.loose.fill_(self.dice.random())

    def _disturb(self) -> None:
        """Change one thing without telling anyone."""
        things = [
            lambda: self.loose.add_(1),
            lambda: self.model(torch.randn(4, _WIDTH)),
            self._resize,
            self._move,
            lambda: torch._foreach_mul_([p.detach() for p in self.model.parameters()], 1.5),
            lambda: self.model[0].weight.detach()[3:5].zero_(),
        ]
        with torch.no_grad():
            self.dice.choice(things)()

    def save(self, disturb: bool) -> None:
        """Save once, and meanwhile train; or change whatever there is, without an optimizer."""
        state = states(self.objects, state_of)
        expected = copy.deepcopy(state)
        budget = self.dice.choice([None, 0, 200_000, 10_000_000])
        saving = fastserial.save_async(state, self.path, snapshot_budget=budget)
        del state
        for _ in range(self.dice.randrange(3)):
            time.sleep(self.dice.choice([0, 0, 0.001, 0.004]))
            if disturb:
                self._disturb()
            else:
                self.step()
        try:
            report = saving.wait()
        except fastserial.StorageChangedError:  # only without copies
            self.outcome.counts["resized"] += 1
            return
        assert report.snapshot is not None
        self.outcome.kinds[report.snapshot.kind] += 1
        save_now(expected, str(self.expected))
        same = self.path.read_bytes() == self.expected.read_bytes()
        self.outcome.counts["saved" if same else "WRONG"] += 1
