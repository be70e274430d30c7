"""A training loop that changes everything while it is being saved, at random moments."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastserial
from fastserial.engines import Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.errors import DistributedError, StorageChangedError
from fastserial.overlap.snapshot import Snapshot


class Unsteady(ThreadsEngine):
    """Takes its time now and then, so that saves of a few MB last."""

    name = "unsteady"

    def submit(self, requests: Sequence[Request]) -> None:
        if random.random() < 0.3:
            time.sleep(0.005)
        super().submit(requests)


OPTIONS: dict[str, Any] = {
    "engine": Unsteady,
    "small_file": 65536,
    "block_size": 65536,
    "queue_depth": 2,
    "durable": False,
}


def without_copies(patch: Any) -> None:
    """Take away what keeps files whole, by a `MonkeyPatch`."""
    patch.setattr(Snapshot, "take", lambda self, parts: None)


class Counting(nn.Module):
    """Has a large buffer that each forward pass changes in place."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(300_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x


def layers(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width), Counting(), nn.Linear(width, width), nn.LayerNorm(width)
    )


class Hostile:
    """One model and optimizer, saved again and again.

    Attributes:
        counts: of files that are the state at the call ("saved"), or another one ("wrong"), and of
            saves that raised ("resized"), which they do only without copies.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dice: random.Random,
        save: Callable[[Any, Path], object],
        begin: Callable[..., fastserial.PendingSave],
        moments: random.Random | None = None,
    ) -> None:
        """Make a loop.

        Args:
            dice: thrown alike by all ranks.
            save: saves objects to a path, and waits.
            begin: the same beside the program, within a budget.
            moments: each rank's own dice, for how long it waits.
        """
        self.model, self.optimizer, self.dice = model, optimizer, dice
        self._save, self._begin, self._moments = save, begin, moments or dice
        self.path, self.expected = (folder / name / "state.pt" for name in ("at", "expected"))
        for path in (self.path, self.expected):
            path.parent.mkdir(exist_ok=True, parents=True)
        inner: Any = getattr(model, "module", model)
        self._weight, self._bias = inner[0].weight, inner[2].bias
        self._seen, self._width = inner[1].seen, inner[0].weight.shape[0]
        self.loose = torch.zeros(400_000)
        self.counts: Counter[str] = Counter()
        self._step()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, self._width)).square().mean().backward()
        self.optimizer.step()

    def _resize(self) -> None:
        self.loose.resize_(self.dice.choice([0, 40_000, 400_000, 500_000])).fill_(7)

    def _move(self) -> None:
        """Free the storage, and make it anew, as FSDP does."""
        storage = self.loose.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes + self.dice.choice([0, 4096]))
        self.loose.fill_(self.dice.random())

    @torch.no_grad()
    def _disturb(self) -> None:
        """Change one thing without telling anyone; on all ranks the same."""
        things: list[Callable[[], object]] = [
            lambda: self.loose.add_(1),
            self._resize,
            self._move,
            lambda: torch._foreach_mul_([one.detach() for one in self.model.parameters()], 1.5),
            lambda: self._weight.mul_(1.5),
            lambda: self._bias.detach().add_(1),
            lambda: self._seen[3:5].zero_(),
        ]
        self.dice.choice(things)()

    def save(self) -> None:
        """Save once, and meanwhile train; or change whatever there is, without an optimizer."""
        objects = {"model": self.model, "optimizer": self.optimizer, "loose": self.loose}
        self._save(objects, self.expected)
        disturb = self.dice.random() < 0.4
        budget = self.dice.choice([None, 0, 1_000_000, 50_000_000])
        saving = self._begin(objects, self.path, budget)
        for _ in range(self.dice.randrange(4)):
            time.sleep(self._moments.choice([0, 0, 0.002, 0.01]))
            if disturb:
                self._disturb()
            else:
                self._step()
        try:
            saving.wait(100)
        except (StorageChangedError, DistributedError) as error:
            if "StorageChangedError" not in getattr(error, "cause", repr(error)):
                raise
            self.counts["resized"] += 1
            return
        same = self.path.read_bytes() == self.expected.read_bytes()
        self.counts["saved" if same else "wrong"] += 1
