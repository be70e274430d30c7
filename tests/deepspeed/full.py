"""A rank of a DeepSpeed job that saves one file. Started by `launch`.

The model has tied weights, parameters of odd sizes, a frozen one, a buffer, and one parameter
group for biases. All ranks see the same data, so that jobs of any size do the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import fastserial
from fastserial.integrations.deepspeed import (
    FastserialCheckpointEngine,
    enable,
    install,
    save_full,
)

VOCABULARY, WIDTH = 37, 11
RATE, WARM_UP = 1e-2, 15


class Model(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 29)
        self.norm = nn.LayerNorm(29)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.down = nn.Linear(29, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1].flatten())
        self.count += 1
        mean = x.detach().mean(0).to(self.mean.dtype)
        self.mean = self.mean.lerp(mean, 0.125)
        x = x - self.mean.to(x.dtype)
        x = x + self.scale * self.down(torch.relu(self.norm(self.up(self.fixed(x)))))
        return nn.functional.cross_entropy(self.head(x).float(), tokens[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    return (start + torch.arange(9)) % VOCABULARY


def rate(step: int) -> float:
    """Return the learning rate of a step, as DeepSpeed's WarmupLR has it."""
    return RATE * math.log(step) / math.log(WARM_UP)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer."""
    named = [item for item in model.named_parameters() if item[1].requires_grad]
    return [
        {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
    ]


def made(options: argparse.Namespace) -> Any:
    """Return an engine."""
    model = Model(options.frozen)
    if options.large:
        model.large = nn.Parameter(torch.ones(300, 1000))
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": WARM_UP}},
        **json.loads(options.config),
    }
    settings["zero_optimization"] = {
        "stage": options.stage,
        "stage3_gather_16bit_weights_on_model_save": True,
        **settings.get("zero_optimization", {}),
    }
    optimizer = torch.optim.AdamW(groups_of(model), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--config", default="{}")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--by-config", action="store_true", help="switch fastserial on by it")
    parser.add_argument("--large", action="store_true", help="with a larger parameter")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if options.by_config:
        install()
    engine = made(options)
    for step in range(options.steps):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        say(step=step, loss=loss.item().hex())
        if step + 1 == options.save_at:
            save(engine, options, step + 1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # stock DeepSpeed under ZeRO 3 now and then aborts while the interpreter ends


def save(engine: Any, options: argparse.Namespace, step: int) -> None:
    """Save what is to be compared."""
    folder: Path = options.folder
    if not isinstance(engine.checkpoint_engine, FastserialCheckpointEngine):
        enable(engine)
    client = {"step": step, "rng": torch.get_rng_state()}
    report = save_full(engine, folder / "full.pt", client_state=client)
    say(saved=report.bytes, wrote=[part.bytes for part in report.ranks])
    save_full(engine, folder / "weights.pt", optimizer=False)
    save_full(engine, folder / "module.pt", optimizer=False, master=False)
    fastserial.uninstall()
    engine.save_checkpoint(str(folder / "stock"))
    engine.save_16bit_model(str(folder), "16bit.pt")


def say(**values: Any) -> None:
    rank = int(os.environ["RANK"])
    sys.stdout.write("\n@" + json.dumps({"rank": rank, **values}, default=str) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
