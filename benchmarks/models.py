"""Checkpoints of transformers' architectures, with random bits instead of weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastserial.bench.measure import BenchError
from fastserial.bench.payload import check_gpu, fill
from fastserial.bench.state import check_memory

__all__ = ["MODELS", "build_model", "model_state"]

_ADVICE = "give a smaller model, float16 weights, or leave out the optimizer"
_STATES_OF_ADAM = ("exp_avg", "exp_avg_sq")

_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_LLAMA3_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
# Name: transformers' model type, and the arguments of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-tiny": ("gpt2", {"n_embd": 256, "n_layer": 4, "n_head": 4}),
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "phi3": ("phi3", {}),
    "llama-7b": ("llama", {}),
    "llama3-1b": ("llama", {**_LLAMA3, **_LLAMA3_1B}),
    "llama3-8b": ("llama", {**_LLAMA3, "intermediate_size": 14336}),
}


def build_model(model: str, device: str) -> tuple[nn.Module, int]:
    """Return a causal language model with random weights, and the size of its vocabulary.

    Args:
        model: a key of `MODELS`, or a folder with a transformers `config.json`.
        device: of it; on `"meta"` it takes no memory.

    Raises:
        BenchError: transformers is not installed, or there is no such model.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be downloaded
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise BenchError("the models come from transformers: pip install transformers") from error
    if model not in MODELS and not Path(model).is_dir():
        raise BenchError(
            f"there is no model {model!r}: give one of {', '.join(MODELS)}, or a folder with a "
            "transformers config.json"
        )
    untyped: Any = AutoModelForCausalLM
    try:  # transformers has many kinds of errors, and pages of text
        if model in MODELS:
            kind, arguments = MODELS[model]
            config = AutoConfig.for_model(kind, **arguments)
        else:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        with torch.device(device):
            return untyped.from_config(config), int(config.vocab_size)
    except Exception as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        message = f"transformers cannot make a causal language model of {model}: {first}"
        raise BenchError(message) from error


def model_state(
    model: str, *, optimizer: bool = False, half: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Return a state dict with random bits; the model itself is never built.

    Args:
        model: a key of `MODELS`, or a folder with a transformers `config.json`.
        optimizer: with Adam's two states of each parameter, in float32, under `optimizer`; the
            weights are under `model` then.
        half: weights in float16.
        device: of all tensors. Tied weights share a storage, as in the model.

    Raises:
        BenchError: transformers or the model is missing, memory is short, or there is no GPU.
    """
    if device != "cpu":
        check_gpu()
    module, _ = build_model(model, "meta")
    # once each: tied weights are one parameter under several names
    named = module.state_dict(keep_vars=True)
    planned = {id(tensor): (tensor, _dtype(tensor, half)) for tensor in named.values()}
    parameters = list(module.parameters()) if optimizer else []
    nbytes = sum(tensor.numel() * dtype.itemsize for tensor, dtype in planned.values())
    nbytes += sum(one.numel() for one in parameters) * len(_STATES_OF_ADAM) * 4
    check_memory(nbytes, _ADVICE)
    if device != "cpu":
        check_gpu(nbytes)
    generator = torch.Generator().manual_seed(0)

    def make(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        fill(made, generator)
        return made.to(device)

    made = {key: make(tensor.shape, dtype) for key, (tensor, dtype) in planned.items()}
    weights = {name: made[id(tensor)] for name, tensor in named.items()}
    if not optimizer:
        return weights
    states = {
        index: {
            "step": torch.tensor(1.0),
            **{name: make(parameter.shape, torch.float32) for name in _STATES_OF_ADAM},
        }
        for index, parameter in enumerate(parameters)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(states)}
    return {"model": weights, "optimizer": {"state": states, "param_groups": [group]}}


def _dtype(tensor: torch.Tensor, half: bool) -> torch.dtype:
    return torch.float16 if half and tensor.is_floating_point() else tensor.dtype
