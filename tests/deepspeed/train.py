"""Trains a small transformer with DeepSpeed on CPU; run as a program, once per rank.

Prints one JSON line per step. The data depends on the step and the rank alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from typing import Any

import deepspeed
import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH, BATCH = 64, 16, 64, 4


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


class Model(nn.Module):
    """A language model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(tokens[:, :-1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int) -> torch.Tensor:
    """Tokens of a step: rows that count up."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (start + torch.arange(LENGTH + 1)) % VOCABULARY


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's config."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "checkpoint": {"checkpoint_serialization": not options.legacy},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 15}},
    }
    if options.bf16:
        config["bf16"] = {"enabled": True}
    config.update(json.loads(options.config))
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder")
    parser.add_argument("--save-at", type=int, action="append", default=[])
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--via", choices=["stock", "install", "enable", "config"], default="stock")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--destroy", action="store_true", help="destroy the engine at the end")
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--config", default="{}")
    parser.add_argument("--full-disk-on", type=int, help="the rank whose disk is full")
    parser.add_argument("--slow-rank", type=int, help="the rank whose saves take 3 s more")
    parser.add_argument("--compare", help="a folder that stock DeepSpeed saves to, too")
    options = parser.parse_args()

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = int(os.environ["RANK"])
    if options.via != "stock":
        import fastserial
        import fastserial.integrations.deepspeed as fast

        fastserial.install(strict=True)
    if options.via == "config":
        fast.install()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(options)
    )
    if options.via == "enable":
        slow = {"engine": slow_writes, "small_file": 0} if options.slow_rank == rank else {}
        fast.enable(engine, overlap=options.overlap, **(slow if options.overlap else {}))
    first = 0
    if options.resume:
        path, state = engine.load_checkpoint(options.folder)
        say(rank, loaded=path, loader=loader(options))
        if path is None:
            os._exit(0)
        first = state["step"]
        torch.set_rng_state(state["rng"][rank])
    for step in range(first, options.steps):
        loss = engine(batch(step, rank))
        engine.backward(loss)
        try:
            engine.step()
        except Exception as error:  # the checkpoint; the step was not made
            say(rank, failed=type(error).__name__, text=str(error))
            unlimited()
            engine.step()
        say(rank, step=step, loss=loss.item().hex())
        if step + 1 in options.save_at:
            rngs: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
            torch.distributed.all_gather_object(rngs, torch.get_rng_state())
            save(engine, options, {"step": step + 1, "rng": rngs}, rank)
        if options.kill_at == step + 1:
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    if options.destroy:
        engine.destroy()
        say(rank, destroyed=latest(options))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # stock DeepSpeed under ZeRO 3 now and then aborts while the interpreter ends


def save(engine: Any, options: argparse.Namespace, state: dict[str, Any], rank: int) -> None:
    """Save a checkpoint and say how."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if options.full_disk_on == rank and state["step"] > options.save_at[0]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # a large file fails
    if options.slow_rank == rank and not options.overlap:
        slow_down(engine.checkpoint_engine)
    try:
        engine.save_checkpoint(options.folder, client_state=state)
    except Exception as error:
        say(rank, failed=type(error).__name__, text=str(error))
        return
    finally:
        if not options.overlap:
            unlimited()
    by = type(engine.checkpoint_engine).__name__
    say(rank, saved=state["step"], by=by, container=container(options), latest=latest(options))
    if options.compare:
        import fastserial
        from fastserial.integrations.deepspeed import disable, enable

        engine.save_16bit_model(options.folder)
        disable(engine)
        fastserial.uninstall()
        engine.save_checkpoint(options.compare, client_state=state)
        engine.save_16bit_model(options.compare)
        fastserial.install()
        enable(engine)


def unlimited() -> None:
    """Let the disk have room again."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def latest(options: argparse.Namespace) -> str | None:
    """What `latest` names."""
    path = os.path.join(options.folder, "latest")
    if not os.path.exists(path):
        return None
    with open(path, encoding="ascii") as file:
        return file.read()


def slow_writes(threads: int) -> Any:
    """An engine that takes 2 s more for each file."""
    from fastserial.engines.threads import ThreadsEngine

    class Slow(ThreadsEngine):
        name = "slow"

        def open(self, *given: Any) -> None:
            time.sleep(2)
            super().open(*given)

        def close(self) -> None:
            super().close()
            time.sleep(0.1)  # what comes next is younger: the clock of files ticks every 4 ms

    return Slow(threads)


def container(options: argparse.Namespace) -> str | None:
    """The container of this rank's last save, if it went through fastserial."""
    if options.via == "stock":
        return None
    import fastserial

    report = fastserial.last_save_report()
    return report.container if report else None


def loader(options: argparse.Namespace) -> str | None:
    """The engine of this rank's last load, if it went through fastserial."""
    if options.via == "stock":
        return None
    from fastserial.reports import last_load_report

    report = last_load_report()
    return report.engine if report else None


def slow_down(checkpoint_engine: Any) -> None:
    """Let each file take 3 s more."""
    original = checkpoint_engine.save

    def slow(state_dict: object, path: str) -> Any:
        time.sleep(3)
        saved = original(state_dict, path)
        time.sleep(0.1)  # what comes next is younger: the clock of files ticks every 4 ms
        return saved

    checkpoint_engine.save = slow


def say(rank: int, **values: Any) -> None:
    sys.stdout.write("\n@" + json.dumps({"rank": rank, **values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
