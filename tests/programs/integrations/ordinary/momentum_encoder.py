"""BYOL and MoCo: the model holds an encoder that follows the trained one, and a queue of keys."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online: Any = nn.Sequential(
            nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 64)
        )
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(2000, 64), dim=1))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def keys(self, inputs: torch.Tensor) -> torch.Tensor:
        """Let the target follow, and return its keys, which go into the queue."""
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        for mine, theirs in zip(self.target.buffers(), self.online.buffers(), strict=True):
            mine.copy_(theirs)
        found = nn.functional.normalize(self.target(inputs), dim=1)
        at = int(self.at)
        self.queue[at : at + len(found)] = found
        self.at.add_(len(found)).remainder_(len(self.queue))
        return found

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        queue = self.queue.clone()
        keys = self.keys(inputs + 0.1 * torch.randn_like(inputs))
        query = nn.functional.normalize(self.online(inputs), dim=1)
        right = (query * keys).sum(1, keepdim=True)
        logits = torch.cat([right, query @ queue.T], dim=1) / 0.2
        return nn.functional.cross_entropy(logits, torch.zeros(len(inputs), dtype=torch.long))


class Program:
    def __init__(self) -> None:
        self.model = Contrast()
        self.optimizer = torch.optim.AdamW(self.model.online.parameters(), lr=1e-3)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        loss = self.model(torch.randn(16, 300))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
