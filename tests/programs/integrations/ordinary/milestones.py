"""MultiStepLR, whose milestones are a Counter, and a Counter of the program's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn


class Program:
    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten()
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 7, 7])
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "seen": Counter(),
        }

    def step(self, number: int) -> None:
        inputs = torch.randn(4, 3, 12, 12)
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state["seen"].update([number % 3, f"lr {self.scheduler.get_last_lr()[0]:.6f}"])
