"""The checkpoint of a model with random weights, built without building the model first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.subjects.models import meta_module
from fastserial.bench.subjects.payload import check_memory, fill
from fastserial.reports import format_bytes

__all__ = ["ModelRecipe", "check_gpu", "model_state"]

_ADVICE = "give a smaller --model, --half, or leave out --optimizer"
_STATES_OF_ADAM = ("exp_avg", "exp_avg_sq")
_STATE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """Which checkpoint to make.

    Attributes:
        model: a name of `fastserial.bench.subjects.models`, or a folder with a transformers config.
        optimizer: with Adam's two states per parameter, in float32.
        half: weights in float16.
        gpu: all tensors on the CUDA device.
    """

    model: str
    optimizer: bool = False
    half: bool = False
    gpu: bool = False


def model_state(recipe: ModelRecipe, seed: int = 0) -> dict[str, Any]:
    """Return the state dict; with an optimizer, those of `model` and `optimizer`.

    Tied weights share a storage, as in the model.

    Raises:
        BenchError: transformers or the model is missing, memory is short, or there is no GPU.
    """
    if recipe.gpu:
        check_gpu()
    module = meta_module(recipe.model)
    # once each: tied weights are one parameter under several names
    named = module.state_dict(keep_vars=True)
    planned = {id(tensor): (tensor, _dtype(tensor, recipe.half)) for tensor in named.values()}
    nbytes = sum(tensor.numel() * dtype.itemsize for tensor, dtype in planned.values())
    if recipe.optimizer:
        count = sum(parameter.numel() for parameter in module.parameters())
        nbytes += count * len(_STATES_OF_ADAM) * _STATE_BYTES
    check_memory(nbytes, _ADVICE)
    if recipe.gpu:
        check_gpu(nbytes)
    make = _Maker("cuda" if recipe.gpu else "cpu", seed)
    made = {key: make(tensor, dtype) for key, (tensor, dtype) in planned.items()}
    weights = {name: made[id(tensor)] for name, tensor in named.items()}
    if not recipe.optimizer:
        return weights
    return {"model": weights, "optimizer": _adam(list(module.parameters()), make)}


def check_gpu(nbytes: int = 0) -> None:
    """Refuse what needs a GPU, where there is none or too little of its memory.

    Raises:
        BenchError: as said.
    """
    if not torch.cuda.is_available():
        raise BenchError(
            "--gpu: torch finds no CUDA device here (torch.cuda.is_available() is False); leave "
            "out --gpu, or see whether driver and CUDA build of torch are installed"
        )
    free, _ = torch.cuda.mem_get_info()
    if free < nbytes:
        raise BenchError(
            f"the data takes {format_bytes(nbytes)} of the GPU's memory and {format_bytes(free)} "
            f"are free: {_ADVICE}"
        )


class _Maker:
    """Makes tensors of random bits, shaped like others."""

    def __init__(self, device: str, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(like.shape, dtype=dtype)
        fill(made, self._generator)
        return made.to(self._device)


def _adam(parameters: list[nn.Parameter], make: _Maker) -> dict[str, Any]:
    """Return what `torch.optim.Adam.state_dict` does after a step."""
    states = {
        index: {
            "step": torch.tensor(1.0),
            **{name: make(parameter, torch.float32) for name in _STATES_OF_ADAM},
        }
        for index, parameter in enumerate(parameters)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(states)}
    return {"state": states, "param_groups": [group]}


def _dtype(tensor: torch.Tensor, half: bool) -> torch.dtype:
    return torch.float16 if half and tensor.is_floating_point() else tensor.dtype
