"""An optimizer that is no `torch.optim.Optimizer`: Lion, by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Lion:
    def __init__(self, named: dict[str, nn.Parameter], lr: float) -> None:
        self.named, self.lr, self.count = named, lr, 0
        self.momentum = {name: torch.zeros_like(one) for name, one in named.items()}

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for name, one in self.named.items():
            momentum = self.momentum[name]
            one.sub_(torch.sign(momentum * 0.9 + one.grad * 0.1), alpha=self.lr)
            momentum.lerp_(one.grad, 0.01)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "count": self.count, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.lr = state["count"], state["lr"]
        for name, value in state["momentum"].items():
            self.momentum[name].copy_(value)


class Program:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(400, 400), nn.GELU(), nn.Linear(400, 400))
        self.optimizer = Lion(dict(self.model.named_parameters()), 1e-3)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "done": 0}

    def step(self, number: int) -> None:
        self.model.zero_grad()
        self.model(torch.randn(8, 400)).square().mean().backward()
        self.optimizer.step()
        self.state["done"] = number
