"""torch.compile of a part of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Program:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200), nn.Linear(200, 200))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.model[0] = torch.compile(self.model[0])
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 200)).square().mean().backward()
        self.optimizer.step()
