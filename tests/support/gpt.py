"""A small GPT, as one process or sharded by FSDP2 over tensor parallelism, and its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GPT", "parallel", "train"]

_WIDTH, _HEADS, _WORDS, _LENGTH, _LAYERS = 48, 4, 101, 16, 2


class Block(nn.Module):
    """Attention and a perceptron; it has only the heads of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.q, self.k, self.v = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        size = _WIDTH // _HEADS
        q, k, v = (
            f(y).view(*y.shape[:2], -1, size).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Its weights are the same on every rank."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.places = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallel(model: GPT, data: int, tensor: int) -> GPT:
    """Shard a model by FSDP2 over `data` ranks and tensor parallelism over `tensor`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("out", "down")}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
    if data > 1 or tensor == 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on the same data on every rank; return the losses."""
    losses: list[float] = []
    for step in steps:
        data = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, _WORDS, (4, _LENGTH + 1), generator=data)
        logits: Any = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
