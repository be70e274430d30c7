"""torchdata's StatefulDataLoader, in the middle of its epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler


class Program:
    def __init__(self) -> None:
        inputs = torch.arange(28.0).reshape(28, 1).expand(28, 300) / 28
        # Two generators: a new iterator draws a number that an unbroken run does not, and with
        # stock, too, a resumed epoch would be followed by another one.
        sampler = RandomSampler(inputs, generator=torch.Generator().manual_seed(7))
        self.loader: Any = StatefulDataLoader(
            inputs, batch_size=4, sampler=sampler, generator=torch.Generator()
        )
        self.model = nn.Sequential(nn.Linear(300, 300), nn.Dropout(0.1), nn.Linear(300, 300))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "loader": self.loader,
        }
        self.batches: Iterator[torch.Tensor] | None = None

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(self.next()).square().mean().backward()
        self.optimizer.step()

    def next(self) -> torch.Tensor:
        if self.batches is not None:
            for batch in self.batches:
                return batch
        self.batches = iter(self.loader)
        return next(self.batches)
