"""One rank of `fastserial bench deepspeed`: a program of its own, started by the benchmark.

Builds a model, trains one step, and saves it in turn with each checkpoint engine. Every time is
that of the slowest rank, and includes what makes the files durable.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine import FastCheckpointEngine, TorchCheckpointEngine
from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (
    DataParallelWriterConfig,
)

import fastserial
from fastserial.bench.measuring.identical import digest
from fastserial.bench.measuring.ranks import MARK
from fastserial.bench.measuring.settle import settle
from fastserial.bench.studies.deepspeed_plan import DeepSpeedBench, RowResult
from fastserial.bench.subjects.models import build_module
from fastserial.bench.subjects.peers import their_op
from fastserial.bench.subjects.saving import sync
from fastserial.files.durable import sync_folders
from fastserial.integrations.deepspeed import disable, enable

__all__: list[str] = []

_TAG = "step"
_BATCH, _LENGTH = 1, 16
_IO_BUFFER = 64 * 1024 * 1024  # DeepSpeed's default

Row = Callable[[Path], float]


def main() -> None:
    """Measure, and let rank 0 print the results as JSON."""
    bench = DeepSpeedBench(**json.loads(sys.argv[1]))
    engine = _train(bench)
    rows = _rows(engine, bench)
    results = {name: RowResult(name) for name in rows}
    digests: dict[str, str] = {}
    for turn in range(bench.runs + 1):  # the first is a warm-up
        for name, row in rows.items():
            result = results[name]
            if result.problem is not None:
                continue
            folder = Path(bench.folder) / f"{turn}-{name.replace(' ', '_')}"
            settle(bench.pause)
            dist.barrier()
            try:
                seconds = _slowest(row(folder))
            except Exception as error:
                result.problem = f"{type(error).__name__}: {error}"
                shutil.rmtree(folder, ignore_errors=True)
                continue
            found = sorted((folder / _TAG).rglob("*.pt"))
            result.files = len(found)
            result.nbytes = sum(path.stat().st_size for path in found)
            if turn:
                result.seconds.append(seconds)
            elif dist.get_rank() == 0 and not bench.legacy and "writer" not in name:
                # a legacy file holds addresses; DeepSpeed's writer names the archive otherwise
                mine = {path.name: digest(path) for path in found}
                digests = digests or mine
                result.identical = mine == digests
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
    if dist.get_rank() == 0:
        text = json.dumps([asdict(result) for result in results.values()])
        sys.stdout.write(f"\n{MARK}{text}\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # stock DeepSpeed under ZeRO 3 now and then aborts while the interpreter ends


def _train(bench: DeepSpeedBench) -> Any:
    """Return an engine that has taken one step, so that the optimizer has its states."""
    cpu = get_accelerator().device_name() == "cpu"
    deepspeed.init_distributed(dist_backend="gloo" if cpu else None, verbose=False)
    torch.manual_seed(0)
    model, vocabulary = build_module(bench.model)
    config = {
        "train_micro_batch_size_per_gpu": _BATCH,
        "zero_optimization": {"stage": bench.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "checkpoint": {"checkpoint_serialization": not bench.legacy},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    tokens = torch.randint(vocabulary, (_BATCH, _LENGTH), device=engine.device)
    engine.backward(engine(tokens, labels=tokens).loss)
    engine.step()
    return engine


def _rows(engine: Any, bench: DeepSpeedBench) -> dict[str, Row]:
    rows: dict[str, Row] = {
        "stock DeepSpeed": lambda folder: _stock(engine, folder),
        "DeepSpeed's fast writer": lambda folder: _fast_writer(engine, folder),
        "fastserial": lambda folder: _fastserial(engine, folder, {}),
    }
    if bench.engine is not None:
        options = {"engine": bench.engine}
        rows[f"fastserial, engine {bench.engine}"] = lambda folder: _fastserial(
            engine, folder, options
        )
    return rows


def _save(engine: Any, folder: Path, durable: bool) -> float:
    """Save a checkpoint and return the seconds it took; not `durable`: make it so."""
    gc.collect()
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
    fastserial.uninstall()
    engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
    return _save(engine, folder, durable=False)


def _fastserial(engine: Any, folder: Path, options: dict[str, Any]) -> float:
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
    if get_accelerator().device_name() == "cpu":
        os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("DS_PIN_MEMORY_BACKEND", None)


def _fast_writer(engine: Any, folder: Path) -> float:
    """DeepSpeed's engine and writer with our patches of torch, and the op that CPU lacks."""
    share = DataParallelWriterConfig(
        world_size=1,
        rank=0,
        global_rank=dist.get_rank(),
        local_rank=engine.local_rank,
        pure_dp=True,
    )
    settings = {
        "type": "FAST",
        "io_buffer_size": _IO_BUFFER,
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


def _slowest(seconds: float) -> float:
    """Return the longest time of all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64)
    device = get_accelerator().current_device_name()
    found = found.to(device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


if __name__ == "__main__":
    main()
