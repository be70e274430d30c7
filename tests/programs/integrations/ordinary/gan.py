"""A GAN: two modules, two optimizers, all in a dict of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Program:
    def __init__(self) -> None:
        self.generator = nn.Sequential(
            nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300)
        )
        self.critic = nn.utils.parametrizations.spectral_norm(nn.Linear(300, 300))
        self.head = nn.Linear(300, 1)
        both = [*self.critic.parameters(), *self.head.parameters()]
        self.of_generator = torch.optim.RMSprop(self.generator.parameters(), lr=1e-3)
        self.of_critic = torch.optim.Adam(both, lr=1e-3, betas=(0.5, 0.9))
        self.state: dict[str, Any] = {
            "networks": {"generator": self.generator, "critic": self.critic, "head": self.head},
            "optimizers": [self.of_generator, self.of_critic],
        }

    def judge(self, made: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.critic(made))).mean()

    def step(self, number: int) -> None:
        with torch.no_grad():
            made = self.generator(torch.randn(16, 64))
        loss = self.judge(made) - self.judge(torch.randn(16, 300) + 1)
        self.of_critic.zero_grad()
        loss.backward()
        self.of_critic.step()
        self.of_generator.zero_grad()
        (-self.judge(self.generator(torch.randn(16, 64)))).backward()
        self.of_generator.step()
