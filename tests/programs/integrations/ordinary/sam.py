"""pytorch-optimizer's SAM: two passes a step, and parameters that move outside of its `step`."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_optimizer import SAM
from torch import nn


class Program:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
        self.optimizer = SAM(self.model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        inputs = torch.randn(8, 400)
        self.model(inputs).square().mean().backward()
        self.optimizer.first_step(zero_grad=True)
        self.model(inputs).square().mean().backward()
        self.optimizer.second_step(zero_grad=True)
