"""From the death of a training run to its first identical step.

A process trains and saves, is killed (SIGKILL), and is started again. Timed is the time from the
kill until the new process has repeated the last step that the killed one reported, with the same
loss: the start of Python, the load, and the steps since the last whole checkpoint. The kill comes
one step after the last save began, so a save in the background may be lost. Tiers: *warm*, the
checkpoint may be in the page cache; *cold*, it is on the disk; *disk lost*, the folder is gone, and
a copy elsewhere is loaded. Exit status 1 if a resumed run has another loss.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import Picture, Say, Script
from overlap import SHAPES, Training

import fastserial
from fastserial.bench.measure import BenchError
from fastserial.bench.state import chill, scratch, settle
from fastserial.bench.table import Column, Result, Spread, Table, number, verdict
from fastserial.bench.torch_rows import sync

_WORKER = "--train"
_LIGHTNING = "Lightning ModelCheckpoint"
_HEADROOM = 4 << 30
_TIERS = ("warm", "cold", "disk lost")
_COLUMNS = (
    Column("seconds", "s to the same step", number(1, 2)),
    Column("again", "steps repeated", str),
    Column("equal", "same loss", verdict),
)


# -- the run that is killed ----------------------------------------------------------------------


def _train(kind: str, folder: Path, copy: Path, model: str, every: int) -> None:
    """Train until killed."""
    training = Training(model, tokens=64, batch=2, device="cpu")
    if kind == _LIGHTNING:
        _train_lightning(training, folder, every)
        return
    first, save = _SAVERS[kind](training, folder, copy)
    for step in itertools.count(first + 1):
        _report(first, step, training.step())
        if step % every == 0:
            save(step)


def _report(first: int, step: int, loss: float) -> None:
    sys.stdout.write(f"{first} {step} {loss.hex()}\n")
    sys.stdout.flush()


def _train_lightning(training: Training, folder: Path, every: int) -> None:
    """Train with Lightning's `Trainer` and `ModelCheckpoint`, as its documentation has it."""
    lightning: Any = importlib.import_module("lightning.pytorch")
    found = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
    first: list[int] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer

        def on_train_start(self) -> None:
            first.append(self.trainer.global_step)

        def training_step(self, _batch: torch.Tensor) -> torch.Tensor:
            return training.loss()

    class Reports(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            _report(first[0], trainer.global_step, outputs["loss"].item())

    keep = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=-1, accelerator="cpu", callbacks=[keep, Reports()], **silent
    )
    steps: Any = range(1_000_000)
    trainer.fit(Module(), torch.utils.data.DataLoader(steps), ckpt_path=found)


_Saver = tuple[int, Callable[[int], object]]  # the step that was resumed, and what saves one


def _fill(training: Training, state: dict[str, Any]) -> int:
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _stock(training: Training, folder: Path, _copy: Path) -> _Saver:
    """Make what many scripts have: one file, overwritten, no fsync."""
    path = folder / "last.pt"
    first = _fill(training, torch.load(path)) if path.exists() else 0
    return first, lambda step: torch.save({**training.state(), "step": step}, path)


def _careful(training: Training, folder: Path, _copy: Path) -> _Saver:
    """Make what careful scripts have: a new file, synced, renamed."""
    path, fresh = folder / "last.pt", folder / "new.pt"
    first = _fill(training, torch.load(path)) if path.exists() else 0

    def save(step: int) -> None:
        torch.save({**training.state(), "step": step}, fresh)
        sync(fresh)
        fresh.replace(path)
        sync(path)

    return first, save


def _installed(training: Training, folder: Path, copy: Path) -> _Saver:
    fastserial.install(strict=True)
    return _stock(training, folder, copy)


def _dcp(training: Training, folder: Path, _copy: Path) -> _Saver:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    whole = sorted(folder.glob("*/.metadata"), key=lambda path: int(path.parent.name))
    first = 0
    if whole:
        training.step()  # the optimizer's state must be there to be filled
        state = {**training.state(), "step": 0}
        dcp.load(state, checkpoint_id=whole[-1].parent, no_dist=True)
        first = _fill(training, state)

    def save(step: int) -> None:
        state = {**training.state(), "step": step}
        dcp.save(state, checkpoint_id=folder / str(step), no_dist=True)

    return first, save


def _checkpointer(training: Training, folder: Path, mirror: str | None = None) -> _Saver:
    state = {"model": training.model, "optimizer": training.optimizer}
    saver = fastserial.Checkpointer(folder, state, mirror=mirror)
    return saver.resume(), saver.save


# what saves and resumes; the last one also without its disk
_SAVERS: dict[str, Callable[[Training, Path, Path], _Saver]] = {
    "stock torch.save": _stock,
    "stock, synced and renamed": _careful,
    "fastserial.install()": _installed,
    "DCP": _dcp,
    "Checkpointer": lambda training, folder, _: _checkpointer(training, folder),
    "Checkpointer, mirror": lambda training, folder, copy: _checkpointer(
        training, folder, copy.as_uri()
    ),
}


# -- measuring -----------------------------------------------------------------------------------


def _measure(options: argparse.Namespace, say: Say) -> Result:
    kinds, missing = [*_SAVERS], {}
    if importlib.util.find_spec("lightning") is not None:
        kinds.insert(2, _LIGHTNING)
    else:
        missing[_LIGHTNING] = "not installed: pip install lightning"
    kinds = [kind for kind in kinds if any(part in kind for part in options.only or [""])]
    tiers = dict.fromkeys(_TIERS[:-1], kinds)
    tiers[_TIERS[-1]] = [kind for kind in kinds if "mirror" in kind]
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (tier, kind): {"name": kind, "runs": [], "again": 0, "equal": True}
        for tier, of_tier in tiers.items()
        for kind in of_tier
    }
    with scratch(options.folder, _HEADROOM) as folder:
        for turn in range(options.runs):
            for (tier, kind), row in rows.items():
                say(f"run {turn + 1} of {options.runs}: {kind}, {tier}")
                _kill_and_resume(folder, kind, tier, options, row)
    for row in rows.values():
        row["seconds"] = Spread.of(row["runs"])
    tables = [
        Table([rows[tier, kind] for kind in of_tier], _COLUMNS, tier)
        for tier, of_tier in tiers.items()
        if of_tier
    ]
    settings = {name: str(value) for name, value in vars(options).items()}
    caption = (
        f"{options.model} model, a checkpoint each {options.every} steps, killed one step after "
        f"the last of {options.saves}; medians of {options.runs} interleaved runs (least–greatest)"
    )
    return Result("resume", options.folder, caption, settings, tables, missing)


def _kill_and_resume(
    folder: Path, kind: str, tier: str, options: argparse.Namespace, row: dict[str, Any]
) -> None:
    place, copy = folder / "run", folder / "copy"
    for path in (place, copy):
        path.mkdir()
    words = [kind, place, copy, options.model, options.every]
    command = [sys.executable, __file__, _WORKER, *map(str, words)]
    last = options.every * options.saves + 1
    try:
        settle(options.pause)
        _, wanted, killed = _run_to(command, last, folder / "errors")
        if tier == "disk lost":
            shutil.rmtree(place)
            place.mkdir()
        elif tier == "cold":
            chill([path for path in place.rglob("*") if path.is_file()])
            killed = perf_counter()  # emptying the page cache is not part of it
        first, found, _ = _run_to(command, last, folder / "errors")
        row["runs"].append(perf_counter() - killed)
    finally:
        for path in (place, copy):
            shutil.rmtree(path)
    row["again"] = max(row["again"], last - first)
    row["equal"] &= found == wanted


def _run_to(command: list[str], last: int, errors: Path) -> tuple[int, str, float]:
    """Run until a step was reported, then kill.

    Returns:
        The step that was resumed, the loss of the last one, and when it was killed.

    Raises:
        BenchError: it ended before; with the last line of its errors.
    """
    with (
        errors.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            for line in process.stdout or ():
                first, step, loss = line.split()
                if int(step) == last:
                    return int(first), loss, perf_counter()
        finally:
            process.kill()
    raise BenchError(f"{command[3]} ended: {errors.read_text().strip().splitlines()[-1:]}")


if __name__ == "__main__":
    if sys.argv[1:2] == [_WORKER]:
        kind_, place_, copy_, model_, every_ = sys.argv[2:]
        _train(kind_, Path(place_), Path(copy_), model_, int(every_))
    brief = {"model": "tiny", "every": 2, "saves": 1, "runs": 1}
    script = Script(__doc__, "half an hour", brief, Picture("seconds", "seconds", 1))
    script.add("--model", choices=SHAPES, default="mini", help="of the GPT that is trained")
    script.add("--every", type=int, default=5, help="steps from one checkpoint to the next")
    script.add("--saves", type=int, default=2, help="checkpoints before the kill")
    script.add("--only", nargs="+", metavar="TEXT", help="kinds with one of these in their names")
    script.run(_measure)
