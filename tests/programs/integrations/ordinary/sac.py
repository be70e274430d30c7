"""Soft actor-critic: a loose `log_alpha` with an optimizer of its own, and a soft target."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def network(ins: int, outs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(ins, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, outs))


class Program:
    def __init__(self) -> None:
        self.actor, self.critics = network(8, 4), nn.ModuleList([network(10, 1), network(10, 1)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.of_critics = torch.optim.Adam(self.critics.parameters(), lr=3e-4)
        self.of_alpha = torch.optim.Adam([self.log_alpha], lr=3e-2)
        self.state: dict[str, Any] = {
            "actor": self.actor,
            "critics": self.critics,
            "targets": self.targets,
            "log_alpha": self.log_alpha,
            "optimizers": {
                "actor": self.of_actor,
                "critics": self.of_critics,
                "alpha": self.of_alpha,
            },
        }

    def act(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.actor(seen).chunk(2, dim=1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        action = normal.rsample()
        return action.tanh(), normal.log_prob(action).sum(1, keepdim=True)

    def step(self, number: int) -> None:
        seen, after, reward = torch.randn(32, 8), torch.randn(32, 8), torch.randn(32, 1)
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            action, chance = self.act(after)
            pair = torch.cat([after, action], 1)
            wanted = reward + 0.99 * (
                torch.minimum(self.targets[0](pair), self.targets[1](pair)) - alpha * chance
            )
        pair = torch.cat([seen, torch.rand(32, 2)], 1)
        loss = sum((critic(pair) - wanted).square().mean() for critic in self.critics)
        self._minimize(self.of_critics, loss)
        action, chance = self.act(seen)
        worth = self.critics[0](torch.cat([seen, action], 1))
        self._minimize(self.of_actor, (alpha * chance - worth).mean())
        self._minimize(self.of_alpha, -(self.log_alpha * (chance.detach() - 2)).mean())
        for mine, theirs in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.05)

    def _minimize(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
