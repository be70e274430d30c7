"""How many bytes each rank writes of what all ranks have: asked of the planners, without a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fastserial.bench.studies.dcp_plan import Balance
from fastserial.distributed import FastSavePlanner

__all__ = ["balances"]

_RANKS = 4
_MIB = 1 << 20
_ITEM = torch.float32.itemsize
_WIDTH, _LAYERS, _VOCABULARY = 1024, 16, 50257

_State = dict[str, torch.Tensor]


def balances() -> list[Balance]:
    """Return it for states of about 1 GiB on four ranks."""
    return [
        Balance(shape, _bytes_of(DefaultSavePlanner, state), _bytes_of(FastSavePlanner, state))
        for shape, state in _shapes().items()
    ]


def _shapes() -> Mapping[str, _State]:
    return {
        "64 tensors of 16 MiB": {f"p{i}": _tensor(16 * _MIB) for i in range(64)},
        "a GPT, the embedding last": dict(_gpt()),
        "one tensor of 1 GiB": {"p": _tensor(1024 * _MIB)},
        "21 weights of 16 MiB, and Adam's state": dict(_adam()),
    }


def _tensor(nbytes: int, width: int = _WIDTH) -> torch.Tensor:
    """Return a tensor of a size; it has no memory."""
    return torch.empty(nbytes // width // _ITEM, width, device="meta")


def _gpt() -> Iterator[tuple[str, torch.Tensor]]:
    square = _WIDTH * _WIDTH * _ITEM
    for layer in range(_LAYERS):
        for name, times in (("qkv", 3), ("out", 1), ("up", 4), ("down", 4)):
            yield f"layers.{layer}.{name}.weight", _tensor(times * square)
            yield f"layers.{layer}.{name}.bias", torch.empty(times * _WIDTH, device="meta")
    yield "positions", _tensor(square)
    yield "embedding", torch.empty(_VOCABULARY, _WIDTH, device="meta")


def _adam() -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(21):
        yield f"model.{index}", _tensor(16 * _MIB)
    for index in range(21):
        yield f"optimizer.{index}.step", torch.empty((), device="meta")
        yield f"optimizer.{index}.exp_avg", _tensor(16 * _MIB)
        yield f"optimizer.{index}.exp_avg_sq", _tensor(16 * _MIB)


def _bytes_of(kind: Callable[[], DefaultSavePlanner], state: _State) -> list[int]:
    """Return the bytes that each rank is to write."""
    planners = [kind() for _ in range(_RANKS)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state, is_coordinator=rank == 0)
    plans, _ = planners[0].create_global_plan([one.create_local_plan() for one in planners])
    finished = (one.finish_plan(plan) for one, plan in zip(planners, plans, strict=True))
    return [sum(map(_nbytes, plan.items)) for plan in finished]


def _nbytes(item: Any) -> int:
    data = item.tensor_data
    return int(prod(data.chunk.sizes) * data.properties.dtype.itemsize) if data is not None else 0
