"""A training run like GPT-2's: a real model, AdamW, random tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from fastserial.bench.measuring.errors import BenchError

__all__ = ["SHAPES", "Shape", "Training"]


class Shape(NamedTuple):
    """A model's size."""

    layers: int
    width: int
    heads: int
    words: int
    length: int


SHAPES = {
    "tiny": Shape(2, 128, 4, 1000, 64),
    "mini": Shape(6, 384, 6, 16384, 256),
    "small": Shape(12, 768, 12, 50257, 1024),
    "medium": Shape(24, 1024, 16, 50257, 1024),
    "large": Shape(36, 1280, 20, 50257, 1024),
}


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.before_attention(x)).chunk(3, dim=-1)
        split = (batch, length, self._heads, width // self._heads)
        query, key, value = (part.view(split).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = functional.gelu(self.up(self.before_mlp(x)))
        out: torch.Tensor = x + self.down(hidden)
        return out


class _Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(_Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight)


class Training:
    """A model, its optimizer, and one step after the other."""

    def __init__(self, shape: str, tokens: int, batch: int, device: str) -> None:
        """Make it.

        Args:
            shape: a key of `SHAPES`.
            tokens, batch: length and number of the sequences of a step.
            device: of the model.

        Raises:
            BenchError: there is no such shape or device.
        """
        if shape not in SHAPES:
            raise BenchError(f"there is no model {shape!r}: give one of {', '.join(SHAPES)}")
        found = SHAPES[shape]
        torch.manual_seed(0)
        try:
            self.model = _Model(found).to(device)
        except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
            raise BenchError(f"there is no device {device!r} here: {error}") from error
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._device = device
        size = (batch, min(tokens, found.length))
        self._tokens = torch.randint(found.words, size, device=device)

    def step(self) -> None:
        """Train one step, to its end."""
        logits = self.model(self._tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self._device != "cpu":
            loss.item()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
