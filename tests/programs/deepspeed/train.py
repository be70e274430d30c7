"""A rank of a job that trains a small model with DeepSpeed on CPU.

Prints one JSON line per step. The data depends on the step and the rank alone; with `--one-file`,
for jobs of any size to do the same, on the step, and nothing else is random.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from support.ranks import join
from torch import nn

VOCABULARY, LENGTH, WIDTH, BATCH = 67, 16, 35, 4
RATE, WARM_UP = 1e-2, 15


class Model(nn.Module):
    """A language model that returns its loss, with tied weights and sizes that are odd.

    Its buffers change, and are the same on all ranks.
    """

    def __init__(self, frozen: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.up = nn.Linear(WIDTH, 131)
        self.norm = nn.LayerNorm(131)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.down = nn.Linear(131, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(tokens[:, :-1].flatten()))
        self.count += 1
        self.mean = self.mean.lerp(self.scale.detach().to(self.mean.dtype).expand(WIDTH), 0.125)
        x = x - self.mean.to(x.dtype)
        x = x + self.scale * self.down(torch.relu(self.norm(self.up(self.fixed(x)))))
        return nn.functional.cross_entropy(self.head(x).float(), tokens[:, 1:].flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer."""
    named = [item for item in model.named_parameters() if item[1].requires_grad]
    return [
        {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int = 0) -> torch.Tensor:
    """Tokens of a step: rows that count up."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (start + torch.arange(LENGTH + 1)) % VOCABULARY


def rate(step: int) -> float:
    """The learning rate of a step, as DeepSpeed's WarmupLR has it."""
    return RATE * math.log(step) / math.log(WARM_UP)


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's config."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0 if options.one_file else 1.0,
        "checkpoint": {"checkpoint_serialization": not options.legacy},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": WARM_UP}},
    }
    if options.bf16:
        config["bf16"] = {"enabled": True}
    config.update(json.loads(options.config))
    config["zero_optimization"] = {
        "stage": options.stage,
        "stage3_gather_16bit_weights_on_model_save": options.one_file,
        **config.get("zero_optimization", {}),
    }
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder")
    parser.add_argument("--one-file", action="store_true", help="saves one, and what is like it")
    parser.add_argument("--frozen", action="store_true", help="a part of the model")
    parser.add_argument("--large", type=int, default=0, help="a parameter of so many rows")
    parser.add_argument("--save-at", type=int, action="append", default=[])
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--via", choices=["stock", "install", "enable", "config"], default="stock")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--data-parallel", action="store_true")
    parser.add_argument("--key", help="one more in client_state; {} is the rank")
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
    rank, _ = join()
    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.init_distributed(verbose=False)  # takes the group that is there
    if options.via != "stock":
        import fastserial
        import fastserial.integrations.deepspeed as fast

        fastserial.install(strict=True)
    if options.via == "config":
        fast.install()
    model = Model(options.frozen, 0.0 if options.one_file else 0.1)
    if options.large:
        model.large = nn.Parameter(torch.ones(options.large, 1000))
    optimizer = torch.optim.AdamW(groups_of(model), lr=RATE)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(options)
    )
    if options.via == "enable":
        more = {"engine": slow_writes, "small_file": 0} if options.slow_rank == rank else {}
        together = options.data_parallel
        fast.enable(engine, overlap=options.overlap, data_parallel=together, **more)
    first = 0
    if options.resume:
        path, state = engine.load_checkpoint(options.folder)
        say(rank, loaded=path, loader=getattr(last(options, "load"), "engine", None))
        if path is None:
            os._exit(0)
        first = state["step"]
        torch.set_rng_state(state["rng"][rank])
    for step in range(first, options.steps):
        loss = engine(batch(step, 0 if options.one_file else rank))
        engine.backward(loss)
        try:
            engine.step()
        except Exception as error:  # the checkpoint; the step was not made
            say(rank, failed=type(error).__name__, text=str(error))
            unlimited()
            engine.step()
        say(rank, step=step, loss=loss.item().hex())
        if step + 1 in options.save_at and options.one_file:
            save_one_file(engine, Path(options.folder), step + 1)
        elif step + 1 in options.save_at:
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
    if options.key:
        state[options.key.format(rank)] = rank
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if options.full_disk_on == rank and state["step"] > options.save_at[0]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # a large file fails
    try:
        engine.save_checkpoint(options.folder, client_state=state)
    except Exception as error:
        say(rank, failed=type(error).__name__, text=str(error))
        return
    finally:
        if not options.overlap:
            unlimited()
    by = type(engine.checkpoint_engine).__name__
    container = getattr(last(options, "save"), "container", None)
    say(rank, saved=state["step"], by=by, container=container, latest=latest(options))
    if options.compare:
        import fastserial
        from fastserial.integrations.deepspeed import disable, enable

        reports = [save.wait() for save in engine.checkpoint_engine._saves]
        reports = reports or [fastserial.last_save_report()]
        shares = [[one.bytes for one in report.ranks] for report in reports if report]
        say(rank, shares=[one for one in shares if one])
        engine.save_16bit_model(options.folder)
        disable(engine)
        fastserial.uninstall()
        engine.save_checkpoint(options.compare, client_state=state)
        engine.save_16bit_model(options.compare)
        fastserial.install()
        enable(engine)


def save_one_file(engine: Any, folder: Path, step: int) -> None:
    """Save in one file, and as DeepSpeed does."""
    import fastserial
    from fastserial.integrations.deepspeed import save_full

    client = {"step": step, "rng": torch.get_rng_state()}
    report = save_full(engine, folder / "full.pt", client_state=client)
    say(int(os.environ["RANK"]), wrote=[part.bytes for part in report.ranks])
    save_full(engine, folder / "weights.pt", optimizer=False)
    save_full(engine, folder / "module.pt", optimizer=False, master=False)
    fastserial.uninstall()
    engine.save_checkpoint(str(folder / "stock"))
    engine.save_16bit_model(str(folder), "16bit.pt")


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
    """An engine that takes 3 s more for each file."""
    from fastserial.engines.threads import ThreadsEngine

    class Slow(ThreadsEngine):
        name = "slow"

        def open(self, *given: Any) -> None:
            time.sleep(3)
            super().open(*given)

        def close(self) -> None:
            super().close()
            time.sleep(0.1)  # what comes next is younger: the clock of files ticks every 4 ms

    return Slow(threads)


def last(options: argparse.Namespace, kind: str) -> Any:
    """The report of this rank's last save or load, if it went through fastserial."""
    if options.via == "stock":
        return None
    import fastserial

    return getattr(fastserial, f"last_{kind}_report")()


def say(rank: int, **values: Any) -> None:
    sys.stdout.write("\n@" + json.dumps({"rank": rank, **values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
