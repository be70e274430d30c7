"""What checkpoints cost a training run, however they are saved.

A GPT is trained with each kind of save and without checkpoints, in turn. Lost are the seconds that
the whole run takes longer than the runs without checkpoints before and after it, slowed steps and
the wait for the last checkpoint included; the first row has none, and shows how much is noise. Exit
status 1 if what one of them saved in the warm-up is not what was to be saved.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import importlib.util
import shutil
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from common import Picture, Say, Script
from peers import different_tensors, unshared
from torch import nn
from torch.nn import functional

import fastserial
from fastserial.bench.measure import BenchError
from fastserial.bench.state import check_memory, scratch, settle
from fastserial.bench.table import Column, Result, Spread, Table, number, verdict
from fastserial.bench.torch_rows import fast, stock, sync
from fastserial.reports import format_bytes

_HEADROOM = 256 << 20
_STEPS_ALONE = 3  # before anything is measured
_COLUMNS = (
    Column("lost_seconds", "lost s a checkpoint", number(1, 2)),
    Column("of_a_step", "of a step", lambda share: f"{share:.0%}"),
    Column("call_seconds", "call, s", number(1, 2)),
    Column("longest_step_seconds", "longest step, s", number(1, 2)),
    Column("equal", "equal", verdict),
)


# -- a training run ------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """A model's size."""

    layers: int
    width: int
    heads: int
    words: int
    length: int


SHAPES = {
    "tiny": _Shape(2, 128, 4, 1000, 64),
    "mini": _Shape(6, 384, 6, 16384, 256),
    "small": _Shape(12, 768, 12, 50257, 1024),
    "medium": _Shape(24, 1024, 16, 50257, 1024),
    "large": _Shape(36, 1280, 20, 50257, 1024),
}


class _Model(nn.Module):
    """A GPT: embeddings, causal transformer blocks, tied output."""

    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width,
                shape.heads,
                4 * shape.width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length, device = tokens.shape[1], tokens.device
        x = self.words(tokens) + self.places(torch.arange(length, device=device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.linear(self.norm(x), self.words.weight)


class Training:
    """A model, AdamW, random tokens, and one step after the other."""

    def __init__(self, shape: str, tokens: int, batch: int, device: str) -> None:
        found = SHAPES[shape]
        torch.manual_seed(0)
        try:
            self.model = _Model(found).to(device)
        except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
            raise BenchError(f"there is no device {device!r} here: {error}") from error
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._device = device
        size = (batch, min(tokens, found.length))
        self._tokens = torch.randint(found.words, size, device=device)

    def loss(self) -> torch.Tensor:
        """Return the loss of the model as it is."""
        logits = self.model(self._tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())

    def step(self) -> float:
        """Train one step, to its end; return the loss."""
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


# -- kinds of save -------------------------------------------------------------------------------


class _Saver(Protocol):
    """Saves one checkpoint after the other; `start` waits for the one before."""

    def start(self, state: dict[str, Any], path: Path) -> None: ...

    def finish(self) -> None: ...


class _Blocking:
    """`torch.save`, as stock (with an fsync of file and directory) or as fastserial has it."""

    def __init__(self, ours: bool) -> None:
        self._ours = ours

    def start(self, state: dict[str, Any], path: Path) -> None:
        with fast() if self._ours else stock():
            torch.save(state, path)
        if not self._ours:
            sync(path)

    def finish(self) -> None:
        pass


class _Pending:
    """A save that returns what is to be waited for."""

    def __init__(self, save: Callable[[dict[str, Any], Path], Callable[[], object]]) -> None:
        self._save = save
        self._wait: Callable[[], object] | None = None

    def start(self, state: dict[str, Any], path: Path) -> None:
        self.finish()
        self._wait = self._save(state, path)

    def finish(self) -> None:
        if self._wait is not None:
            self._wait()
        self._wait = None


def _beside(state: dict[str, Any], path: Path) -> Callable[[], object]:
    return fastserial.save_async(state, path).wait


def _dcp(state: dict[str, Any], path: Path) -> Callable[[], object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        waits: Callable[[], object] = dcp.async_save(state, checkpoint_id=path, no_dist=True).result
    return waits


class _TorchCheckpointing:
    """The asynchronous manager of torch_checkpointing, in a process of its own."""

    def __init__(self) -> None:
        package: Any = importlib.import_module("torch_checkpointing")
        self._manager = package.CheckpointManager.Config.with_async_save().build()
        self._last: Any = None

    def start(self, state: dict[str, Any], path: Path) -> None:
        if self._last is not None:
            self._last.result()
        self._last = self._manager.save(str(path), state)
        with self._manager.lock():  # a step must not change what it stages
            pass

    def finish(self) -> None:
        if self._last is not None:
            self._last.result()
        self._last = None
        self._manager.close()


class _Lightning:
    """Lightning's AsyncCheckpointIO: a copy, and torch.save in a thread."""

    def __init__(self) -> None:
        plugins: Any = importlib.import_module("lightning.pytorch.plugins.io")
        self._plugin = plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO())

    def start(self, state: dict[str, Any], path: Path) -> None:
        self._plugin.save_checkpoint(state, path)

    def finish(self) -> None:
        self._plugin.teardown()


# name: what makes its saver, its package, whether it leaves a file that torch loads
_SAVERS: dict[str, tuple[Callable[[], _Saver], str, bool]] = {
    "stock torch.save": (lambda: _Blocking(False), "torch", True),
    "fastserial, blocking": (lambda: _Blocking(True), "torch", True),
    "fastserial, save_async": (lambda: _Pending(_beside), "torch", True),
    "DCP async_save": (lambda: _Pending(_dcp), "torch", False),
    "torch_checkpointing, not durable": (_TorchCheckpointing, "torch_checkpointing", False),
    "Lightning AsyncCheckpointIO, not durable": (_Lightning, "lightning", True),
}


# -- measuring -----------------------------------------------------------------------------------


@dataclass
class _Kind:
    """One kind of save, or none, and what was found of it; times in seconds.

    Attributes:
        seconds: of each run.
        without: mean of the runs without checkpoints right before and after each.
        steps: of the last run, each with the call that saves after it.
        calls: of each call that saves.
        equal: whether what was saved in the warm-up is what was to be saved; None: nobody looked.
        problem: why it cannot be measured.
    """

    name: str
    make: Callable[[], _Saver] | None = None
    is_torch_file: bool = False
    seconds: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    equal: bool | None = None
    problem: str | None = None


def _measure(options: argparse.Namespace, say: Say) -> Result:
    with fast():
        pass
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    say("making the model")
    training = Training(options.model, options.tokens, options.batch, options.device)
    for _ in range(_STEPS_ALONE):
        training.step()
    nbytes = sum(tensor.nbytes for tensor in unshared(training.state()).values())
    check_memory(3 * nbytes, "give a smaller --model")
    kinds, missing = _chosen(options.only)
    alone = _Kind("no checkpoints")
    nobody = _Kind("")
    with scratch(options.folder, (options.saves + 1) * nbytes + _HEADROOM) as folder:
        for turn in range(-1, options.runs):  # the first is a warm-up
            label = f"round {turn + 1}/{options.runs}" if turn >= 0 else "warm-up"
            before = _run(training, nobody, options, folder, turn < 0)
            for kind in (alone, *(kind for kind in kinds if kind.problem is None)):
                say(f"{label}: {kind.name}")
                seconds = _run(training, kind, options, folder, turn < 0)
                after = _run(training, nobody, options, folder, turn < 0)
                if kind.problem is not None:  # what it left running ends meanwhile
                    after = _run(training, nobody, options, folder, turn < 0)
                elif turn >= 0:
                    kind.seconds.append(seconds)
                    kind.without.append((before + after) / 2)
                before = after
    missing |= {kind.name: kind.problem for kind in kinds if kind.problem is not None}
    measured = [alone, *(kind for kind in kinds if kind.problem is None)]
    steps = options.every * (options.saves + 1)
    step = statistics.median(one for kind in measured for one in kind.without) / steps
    caption = (
        f"{options.model} model on {options.device}, {options.batch} × {options.tokens} tokens a "
        f"step, {step:.2f} s{f' on {options.threads} threads' if options.threads else ''}; a "
        f"checkpoint of {format_bytes(nbytes)} each {options.every} steps; medians of "
        f"{options.runs} interleaved runs (least–greatest)"
    )
    rows = [_row(kind, step, options.saves) for kind in measured]
    settings = {name: str(value) for name, value in vars(options).items()}
    more = {"bytes": nbytes, "step_seconds": step}
    table = Table(rows, _COLUMNS)
    return Result("overlap", options.folder, caption, settings, [table], missing, more=more)


def _row(kind: _Kind, step: float, saves: int) -> dict[str, Any]:
    pairs = zip(kind.seconds, kind.without, strict=True)
    lost = Spread.of((mine - without) / saves for mine, without in pairs)
    return {
        "name": kind.name,
        "lost_seconds": lost,
        "of_a_step": lost.median / step,
        "call_seconds": Spread.of(kind.calls) if kind.calls else None,
        "longest_step_seconds": max(kind.steps),
        "equal": kind.equal,
        "seconds": kind.seconds,
        "without": kind.without,
        "steps": kind.steps,
    }


def _chosen(only: list[str] | None) -> tuple[list[_Kind], dict[str, str]]:
    """Return the kinds of save with one of these texts in their names, and which are missing."""
    kinds = []
    missing = {}
    for name, (make, package, is_torch_file) in _SAVERS.items():
        if only and not any(part in name for part in only):
            continue
        if importlib.util.find_spec(package) is None:
            missing[name] = f"not installed: pip install {package}"
        else:
            kinds.append(_Kind(name, make, is_torch_file))
    if not kinds:
        raise BenchError(f"no kind of save has {' or '.join(only or [])!r} in its name")
    return kinds, missing


def _run(
    training: Training, kind: _Kind, options: argparse.Namespace, folder: Path, warming: bool
) -> float:
    """Train once; returns its seconds."""
    place = folder / "run"
    place.mkdir()
    gc.collect()
    settle(options.pause)
    try:
        return _train(training, kind, options, place, warming)
    except Exception as error:
        if kind.make is None or "fastserial" in kind.name:
            raise
        kind.problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return 0.0
    finally:
        shutil.rmtree(place)


def _train(
    training: Training, kind: _Kind, options: argparse.Namespace, folder: Path, warming: bool
) -> float:
    saver = kind.make() if kind.make is not None else None
    steps, calls = [], []
    expected = None
    # as many steps behind the last checkpoint as between two
    count = options.every * (2 if warming else options.saves + 1)
    began = last = perf_counter()
    for step in range(1, count + 1):
        training.step()
        if saver is not None and step % options.every == 0 and step < count:
            if warming:
                expected = copy.deepcopy(training.state())
            asked = perf_counter()
            saver.start(training.state(), folder / f"step-{step}.pt")
            calls.append(perf_counter() - asked)
        now = perf_counter()
        steps.append(now - last)
        last = now
    if saver is not None:
        saver.finish()
    seconds = perf_counter() - began
    if not warming:
        kind.steps = steps
        kind.calls += calls
    elif kind.is_torch_file:
        (path,) = folder.iterdir()
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        kind.equal = not different_tensors(unshared(expected), unshared(found))
    return seconds


if __name__ == "__main__":
    brief = {"model": "tiny", "tokens": 64, "batch": 1, "every": 2, "saves": 1, "runs": 1}
    picture = Picture("lost_seconds", "seconds lost by a checkpoint", 1)
    script = Script(__doc__, "an hour", brief, picture)
    script.add("--model", choices=SHAPES, default="small", help="size of the GPT; small: GPT-2's")
    script.add("--tokens", type=int, default=256, help="length of a sequence")
    script.add("--batch", type=int, default=2, help="sequences of a step")
    script.add("--every", type=int, default=4, help="steps between two checkpoints")
    script.add("--saves", type=int, default=2, help="checkpoints of a run")
    script.add("--device", default="cpu", help="where to train: cpu, cuda, ...")
    script.add("--threads", type=int, help="that compute; the other cores are left to the writer")
    script.add("--only", nargs="+", help="kinds of save with one of these in their names")
    script.run(_measure)
