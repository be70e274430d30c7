"""`fastserial demo --crash`: a process is killed while it saves, and the file is loaded.

One process saves checkpoints over each other with stock torch, another with fastserial. Both get
`SIGKILL` at a random moment of a save. Then stock `torch.load` says what is at the path.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from fastserial.bench.measure import BenchError
from fastserial.bench.state import check_memory, scratch
from fastserial.bench.torch_rows import fast, stock
from fastserial.console import say

_SAVERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "stock torch": stock,
    "fastserial": fast,
}
_TENSOR = 16 << 20  # bytes of one tensor
_SLACK = 64 << 20
_STEPS = (1, 2, 3)  # the first save makes the file; the second is timed; the third is killed
OLD, NEW, MIXED = "the old checkpoint", "the new checkpoint", "parts of both checkpoints"


def run_crash(
    folder: Path, nbytes: int, runs: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, Counter[str]]:
    """Kill `runs` saves of each kind.

    Args:
        folder: where to write; it needs room for two checkpoints.
        nbytes: size of the checkpoint.
        runs: kills of each kind.
        say: gets a line when something begins.

    Returns:
        By kind of save, how often `torch.load` got the `OLD` checkpoint, the `NEW` one, parts of
        both (`MIXED`), or an error, by its text.

    Raises:
        BenchError: there is too little memory or disk, or a saving process failed.
    """
    check_memory(2 * nbytes)
    found: dict[str, Counter[str]] = {name: Counter() for name in _SAVERS}
    with scratch(folder, 2 * nbytes + _SLACK) as inside:
        for run in range(runs):
            for name, outcomes in found.items():
                say(f"{name}, kill {run + 1} of {runs}")
                path = inside / "ckpt.pt"
                _kill_a_save(name, path, nbytes)
                outcomes[_outcome(path)] += 1
                path.unlink(missing_ok=True)
    return found


def _kill_a_save(name: str, path: Path, nbytes: int) -> None:
    """Start a process that saves, and kill it at a random moment of its last save."""
    command = [sys.executable, "-m", __name__, name, str(path), str(nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise BenchError(f"a process that saves with {name} failed: see above")
            time.sleep(random.uniform(0.1, 0.9) * float(line))
        finally:
            process.send_signal(signal.SIGKILL)


def _outcome(path: Path) -> str:
    """Return what stock `torch.load` gets."""
    with stock():
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:  # whatever it is: the checkpoint is lost
            return str(error).split("\n")[0].split(". ")[0] or type(error).__name__
    step = state["step"]
    if not all(bool((tensor == step).all()) for tensor in state["weights"]):
        return MIXED
    return NEW if step == _STEPS[-1] else OLD


def _state(step: int, nbytes: int) -> dict[str, Any]:
    count = max(1, nbytes // _TENSOR)
    weights = [torch.full((_TENSOR // 4,), float(step)) for _ in range(count)]
    return {"step": step, "weights": weights}


def _save(name: str, path: Path, nbytes: int) -> None:
    """Save three checkpoints to a path; print how long one takes before the last begins."""
    with _SAVERS[name]():
        torch.save(_state(_STEPS[0], nbytes), path)
        old, new = (_state(step, nbytes) for step in _STEPS[1:])
        start = time.perf_counter()
        torch.save(old, path)
        say(time.perf_counter() - start)
        sys.stdout.flush()
        torch.save(new, path)
    signal.pause()  # until it is killed


if __name__ == "__main__":
    _save(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
