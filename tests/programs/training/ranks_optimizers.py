"""A rank: one optimizer over two modules and a tensor, saved, resumed from, and refused.

Arguments: folder, with a checkpoint that one process made in `alone`. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.ranks import join
from torch import nn

from fastserial import Checkpointer, FastserialError


class Agent:
    """As of SAC: an actor, a critic, and the logarithm of a temperature."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.actor, self.critic = nn.Linear(8, 8), nn.Linear(8, 8)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        parameters = [self.log_alpha, *self.critic.parameters(), *self.actor.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=0.1)
        self.state: dict[str, Any] = {
            "train": self.actor,  # a module has a method of this name
            "critic": self.critic,
            "log_alpha": self.log_alpha,
            "optimizer": self.optimizer,
        }

    def step(self) -> str:
        self.optimizer.zero_grad()
        loss = self.critic(self.actor(torch.ones(2, 8))).square().mean() * self.log_alpha.exp()
        loss.backward()
        self.optimizer.step()
        return loss.item().hex()


def went_on(folder: Path, steps: int = 3) -> list[Any]:
    """Resume a new agent, and return the step and its losses from there on."""
    again = Agent(2)
    with Checkpointer(folder, again.state, timeout=60) as checkpointer:
        return [checkpointer.resume(), *(again.step() for _ in range(steps))]


def refusals(folder: Path) -> list[str]:
    """Check and save with an optimizer that has a parameter which nothing names."""
    agent = Agent(1)
    del agent.state["log_alpha"]
    found = []
    with Checkpointer(folder, agent.state, timeout=60) as checkpointer:
        for call in (checkpointer.check, lambda: checkpointer.save(1)):
            try:
                call()
            except FastserialError as error:
                found.append(str(error))
    return found


def main() -> None:
    join()
    folder = Path(sys.argv[1])
    agent = Agent(1)
    with Checkpointer(folder / "ranks", agent.state, timeout=60) as checkpointer:
        checkpointer.check()
        agent.step()
        checkpointer.save(1)
    found = {
        "expected": [1, *(agent.step() for _ in range(3))],
        "went on": went_on(folder / "ranks"),
        "from one process": went_on(folder / "alone"),
        "refused": refusals(folder / "refused"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
