"""A checkpoint of a DeepSpeed run: stock DeepSpeed, DeepSpeed's fast writer, fastserial, in turn.

A model is built with random weights, trained for one step, and saved. Timed is `save_checkpoint` on
the slowest rank, from the barrier before to the barrier after, and what makes the files durable.
Exit status 1 if a file differs from stock DeepSpeed's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import Picture, Say, Script
from models import MODELS, build_model
from peers import their_op
from ranks import WORKER, everywhere, finish, fresh, run_ranks, start

import fastserial
from fastserial import engines
from fastserial.bench.measure import MB, BenchError
from fastserial.bench.payload import digest
from fastserial.bench.state import scratch
from fastserial.bench.table import Column, Result, Spread, Table, number, ratio, size, verdict
from fastserial.bench.torch_rows import sync
from fastserial.files.durable import sync_folders

_TAG = "step"
_BATCH, _LENGTH = 1, 16
_COLUMNS = (
    Column("files", "files"),
    Column("bytes", "size", size),
    Column("seconds", "seconds", number(1, 2)),
    Column("bytes_per_second", "MB/s", number(MB)),
    Column("to_stock", "× stock", number(1, 2)),
    Column("identical", "identical", verdict),
)


def _measure(options: argparse.Namespace, say: Say) -> Result:
    if importlib.util.find_spec("deepspeed") is None:
        raise BenchError("DeepSpeed is not installed: pip install deepspeed")
    lacks = next((one.missing for one in engines.survey() if one.name == "deepspeed"), "unknown")
    settings = {
        "model": options.model,
        "zero_stage": options.zero_stage,
        "runs": options.runs,
        "legacy": options.legacy and not options.zipfile,
        "io_buffer_mb": options.io_buffer_mb,
        "engine": "deepspeed" if lacks is None else None,
        "pause": options.pause,
    }
    with scratch(options.folder, 0) as folder:
        say("training one step, then saving")
        argument = {**settings, "folder": str(folder)}
        found = run_ranks(__file__, argument, options.world_size)
    for row in found:
        if row["runs"]:
            row["seconds"] = Spread.of(row["runs"])
            row["bytes_per_second"] = Spread.of(row["bytes"] / one for one in row["runs"])
            row["to_stock"] = ratio(row["runs"], found[0]["runs"])
    caption = (
        f"{options.model}, ZeRO {options.zero_stage}, {options.world_size} processes, "
        f"{'legacy' if settings['legacy'] else 'zip'}; medians of {options.runs} interleaved runs "
        "(least–greatest), all durable; ratios are of runs of the same round"
    )
    missing = {} if lacks is None else {"DeepSpeed's fast writer, engine deepspeed": lacks}
    settings |= {"world_size": options.world_size}
    table = Table(found, _COLUMNS)
    return Result("deepspeed_save_model", options.folder, caption, settings, [table], missing)


# -- one rank ------------------------------------------------------------------------------------


def _worker() -> None:
    bench = start()
    engine = _train(bench)
    saves: dict[str, Callable[[Path], Any]] = {
        "stock DeepSpeed": partial(_stock, engine),
        "fastserial": partial(_fastserial, engine, {}),
    }
    if bench["engine"] is not None:  # DeepSpeed's op is there, which its writer uses, too
        saves["DeepSpeed's fast writer"] = partial(_fast_writer, engine, bench["io_buffer_mb"])
        options = {"engine": bench["engine"]}
        saves[f"fastserial, engine {bench['engine']}"] = partial(_fastserial, engine, options)
    rows: list[dict[str, Any]] = [
        {"name": name, "runs": [], "bytes": 0, "files": 0, "identical": None, "problem": None}
        for name in saves
    ]
    stocks: dict[str, str] = {}
    for turn in range(bench["runs"] + 1):  # the first is a warm-up
        for row, save in zip(rows, saves.values(), strict=True):
            if row["problem"] is not None:
                continue
            folder = fresh(Path(bench["folder"]) / "row", bench["pause"])
            gc.collect()
            done, problem = everywhere(partial(save, folder))
            row["problem"] = problem
            if problem is not None:
                continue
            found = sorted((folder / _TAG).rglob("*.pt"))
            row |= {"files": len(found), "bytes": sum(path.stat().st_size for path in found)}
            if turn:
                row["runs"].append(max(one.value for one in done))
            elif not bench["legacy"] and "writer" not in row["name"]:
                # a legacy file holds addresses; DeepSpeed's writer names the archive otherwise
                mine = {path.name: digest(path) for path in found}
                stocks = stocks or mine
                row["identical"] = mine == stocks
    finish(rows)


def _train(bench: dict[str, Any]) -> Any:
    """Return an engine that has taken one step, so that the optimizer has its states."""
    import deepspeed

    deepspeed.init_distributed(verbose=False)  # takes the group that is there
    torch.manual_seed(0)
    model, vocabulary = build_model(bench["model"], "cpu")
    config = {
        "train_micro_batch_size_per_gpu": _BATCH,
        "zero_optimization": {"stage": bench["zero_stage"]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "checkpoint": {"checkpoint_serialization": not bench["legacy"]},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    tokens = torch.randint(vocabulary, (_BATCH, _LENGTH), device=engine.device)
    engine.backward(engine(tokens, labels=tokens).loss)
    engine.step()
    return engine


def _save(engine: Any, folder: Path, durable: bool) -> float:
    """Save a checkpoint, and return the seconds it took; not `durable`: make it so."""
    dist = torch.distributed
    dist.barrier()
    began = perf_counter()
    engine.save_checkpoint(str(folder), tag=_TAG)
    if not durable:
        rank = dist.get_rank()
        for path in sorted((folder / _TAG).glob("*.pt"))[rank :: dist.get_world_size()]:
            sync(path)
        if rank == 0:
            sync(folder / "latest")
            sync_folders([str(folder / _TAG)])
    dist.barrier()
    return perf_counter() - began


def _stock(engine: Any, folder: Path) -> float:
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    fastserial.uninstall()
    engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
    return _save(engine, folder, durable=False)


def _fastserial(engine: Any, options: dict[str, Any], folder: Path) -> float:
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    from fastserial.integrations.deepspeed import disable, enable

    engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
    enable(engine, **options)
    try:
        return _save(engine, folder, durable=True)
    finally:
        disable(engine)


@contextlib.contextmanager
def _pinned_natively() -> Iterator[None]:
    """Without a GPU DeepSpeed pins its buffer only with its own backend, which is set here."""
    before = os.environ.get("DS_PIN_MEMORY_BACKEND")
    if not torch.cuda.is_available():
        os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("DS_PIN_MEMORY_BACKEND", None)


def _fast_writer(engine: Any, io_buffer_mb: int, folder: Path) -> float:
    """DeepSpeed's engine and writer with our patches of torch, and the op that CPU lacks."""
    from deepspeed.runtime.checkpoint_engine import FastCheckpointEngine, TorchCheckpointEngine
    from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (
        DataParallelWriterConfig,
    )

    share = DataParallelWriterConfig(
        world_size=1,
        rank=0,
        global_rank=torch.distributed.get_rank(),
        local_rank=engine.local_rank,
        pure_dp=True,
    )
    settings = {
        "type": "FAST",
        "io_buffer_size": io_buffer_mb << 20,
        "io_buffer_double": True,
        "show_statistics": False,
        "io_multiplier": 1,
    }
    config = engine._config
    before = config.checkpoint_config
    config.checkpoint_config = {**before, "writer": settings}
    fastserial.install()
    try:
        with their_op(), _pinned_natively():
            engine.checkpoint_engine = FastCheckpointEngine(config, share, False)
            return _save(engine, folder, durable=False)
    finally:
        fastserial.uninstall()
        config.checkpoint_config = before
        engine.checkpoint_engine = TorchCheckpointEngine(config)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        _worker()
    brief = {"model": "gpt2-tiny", "runs": 1}
    script = Script(__doc__, "five minutes", brief, Picture())
    models = f"{', '.join(MODELS)}, or a folder with a transformers config.json"
    script.add("--model", default="gpt2", help=models)
    script.add("--zero_stage", type=int, choices=range(4), default=1, help="of ZeRO")
    script.add("--world_size", type=int, default=1, help="processes on this machine")
    script.add("--zipfile", action="store_true", help="torch's zip format, as by default")
    script.add("--legacy", action="store_true", help="torch's legacy format")
    script.add("--io_buffer_mb", type=int, default=64, help="MiB of DeepSpeed's writer's buffer")
    script.run(_measure)
