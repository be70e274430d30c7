"""Models for the benchmarks: architectures of transformers with random weights, no downloads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserial.bench.measuring.errors import BenchError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODELS", "build_module", "meta_module"]

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


def build_module(model: str) -> tuple[nn.Module, int]:
    """Return a causal language model and the size of its vocabulary.

    Args:
        model: a key of `MODELS`, or a folder with a transformers `config.json`.

    Raises:
        BenchError: transformers is not installed, or there is no such model.
    """
    make, config = _architecture(model)
    return make(), int(config.vocab_size)


def meta_module(model: str) -> nn.Module:
    """Return the same model without weights, on torch's meta device: it takes no memory.

    Raises:
        BenchError: transformers is not installed, or there is no such model.
    """
    import torch

    make, _ = _architecture(model)
    with torch.device("meta"):
        return make()


def _architecture(model: str) -> tuple[Callable[[], nn.Module], Any]:
    """Return what makes a model, and its config."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be downloaded
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise BenchError("the models come from transformers: pip install transformers") from error
    if model in MODELS:
        kind, arguments = MODELS[model]
        config = AutoConfig.for_model(kind, **arguments)
    elif Path(model).is_dir():
        with _told(f"transformers cannot read {Path(model) / 'config.json'}"):
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    else:
        raise BenchError(
            f"there is no model {model!r}: give one of {', '.join(MODELS)}, or a folder with a "
            "transformers config.json"
        )

    def make() -> nn.Module:
        untyped: Any = AutoModelForCausalLM
        with _told(f"transformers cannot make a causal language model of {model}"):
            made: nn.Module = untyped.from_config(config)
        return made

    return make, config


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Make an error of transformers, which has many kinds and pages of text, one line."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise BenchError(f"{what}: {first or type(error).__name__}") from error
