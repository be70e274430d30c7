"""Ways to save checkpoints of a training run, most of them beside it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import fastserial
from fastserial.bench.subjects.saving import fast, stock, sync

__all__ = ["Saver", "Way", "ways"]


class Saver(Protocol):
    """Saves one checkpoint after the other."""

    def start(self, state: dict[str, Any], path: Path) -> None:
        """Save, or start to; waits for the checkpoint before."""

    def finish(self) -> None:
        """Wait for the last one."""


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table.

    Attributes:
        name: for people.
        make: the saver.
        load: reads a checkpoint back; None: nobody looks at it.
    """

    name: str
    make: Callable[[], Saver]
    load: Callable[[Path], dict[str, Any]] | None = None


@dataclass(slots=True)
class _Blocking:
    save: Callable[[dict[str, Any], Path], object]

    def start(self, state: dict[str, Any], path: Path) -> None:
        self.save(state, path)

    def finish(self) -> None:
        pass


@dataclass(slots=True)
class _Beside:
    """`save_async`."""

    options: dict[str, Any]
    last: fastserial.PendingSave | None = None

    def start(self, state: dict[str, Any], path: Path) -> None:
        self.finish()
        self.last = fastserial.save_async(state, path, **self.options)

    def finish(self) -> None:
        if self.last is not None:
            self.last.wait()
        self.last = None


@dataclass(slots=True)
class _Dcp:
    """torch.distributed.checkpoint's `async_save`, with its stager."""

    last: Any = None

    def start(self, state: dict[str, Any], path: Path) -> None:
        self.finish()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp: Any = importlib.import_module("torch.distributed.checkpoint")
            self.last = dcp.async_save(state, checkpoint_id=path, no_dist=True)

    def finish(self) -> None:
        if self.last is not None:
            self.last.result()
        self.last = None


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


def ways() -> tuple[list[Way], dict[str, str]]:
    """Return all ways there are here, and why others are missing."""
    found = [
        Way("stock torch.save", lambda: _Blocking(_stock), _load),
        Way("fastserial, blocking", lambda: _Blocking(_fast), _load),
        Way("fastserial, copy", lambda: _Beside({"snapshot": "copy"}), _load),
        Way("fastserial, in place", lambda: _Beside({"snapshot": "in_place"}), _load),
    ]
    missing = {}
    for name, module, package, make, load in _PEERS:
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if there:
            found.append(Way(name, make, load))
        else:
            missing[name] = f"not installed: pip install {package}"
    return found, missing


def _stock(state: dict[str, Any], path: Path) -> None:
    with stock():
        torch.save(state, path)
    sync(path)


def _fast(state: dict[str, Any], path: Path) -> None:
    with fast():
        torch.save(state, path)


def _load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return found


_PEERS: list[tuple[str, str, str, Callable[[], Saver], Callable[[Path], dict[str, Any]] | None]] = [
    ("DCP async_save", "torch.distributed.checkpoint", "torch", _Dcp, None),
    (
        "torch_checkpointing, not durable",
        "torch_checkpointing",
        "torch_checkpointing",
        _TorchCheckpointing,
        None,
    ),
    (
        "Lightning AsyncCheckpointIO, not durable",
        "lightning.pytorch.plugins.io",
        "lightning",
        _Lightning,
        _load,
    ),
]
