"""Training runs that are saved before their first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support.own_loading import Asking


class Rows(torch.optim.Optimizer):
    """Keeps a number for each row, which is split as the parameter is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                rows = parameter.grad.square()
                if rows.dim() > 1:
                    rows = rows.mean(-1, keepdim=True)
                state["rows"] = rows + state["rows"] if "rows" in state else rows + 1
                parameter.sub_(parameter.grad / state["rows"].sqrt() * group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adam lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rows": Rows,
    "asking": Asking,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


class Net(nn.Module):
    """One of its parameters gets no gradient, so that the optimizer has no state for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(8, 4))
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).tanh())
        return out


class Run:
    """A small training run, the same each time."""

    def __init__(self, optimizer: str, wrap: Callable[[Any], Any] = lambda net: net) -> None:
        torch.manual_seed(1)
        self.model = wrap(Net())
        make: Any = torch.optim.LBFGS if optimizer == "lbfgs" else OPTIMIZERS[optimizer]
        self.optimizer = make(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer, "at": 0}

    def steps(self, until: int) -> list[str]:
        """Train to a step, and return the losses, exactly."""
        return [self._step() for _ in range(self.state["at"], until)]

    def _step(self) -> str:
        self.state["at"] += 1
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(self.state["at"]))

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(inputs).square().mean()
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return self.optimizer.step(closure).item().hex()
        loss = closure()
        self.optimizer.step()
        return loss.item().hex()
