"""torch-ema: the averages take the weights' place for each evaluation."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch_ema import ExponentialMovingAverage


class Program:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.ema = ExponentialMovingAverage(self.model.parameters(), decay=0.9)
        self.losses: list[float] = []
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "losses": self.losses,
        }

    def step(self, number: int) -> None:
        inputs = torch.randn(8, 400)
        self.ema.store()
        self.ema.copy_to()
        with torch.no_grad():
            self.state["losses"].append(self.model(inputs).square().mean().item())
            time.sleep(0.05)  # an evaluation takes longer
        self.ema.restore()
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.ema.update()
