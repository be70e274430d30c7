"""A rank: what Checkpointers make of folders and signals that the ranks do not share.

Arguments: folder. Prints one JSON object: what each case came to on this rank.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import join

from fastserial import Checkpointer
from fastserial.training.folder import CheckpointFolder


def outcome(work: Callable[[], Any]) -> Any:
    """Return what a call returned, or its error, and its warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = work()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    return [found, *(str(warning.message) for warning in warned)]


def save(folder: Path, *steps: int) -> None:
    """Let this rank write checkpoints that the others need not see."""
    for step in steps:
        own = {"version": 1, "step": step}
        folder.mkdir(exist_ok=True)
        torch.save({"x": step, "checkpointer": own}, folder / f"step-{step:08d}.pt")


def not_shared(folder: Path, rank: int) -> Any:
    """Resume where rank 0 alone, rank 1 alone, or both see checkpoints, each in its own folder."""
    found = {}
    for name, steps in {"0": [(10,), ()], "1": [(), (20,)], "both": [(10, 20), (10, 30)]}.items():
        mine = folder / f"{name}-of-{rank}"
        save(mine, *steps[rank])
        with Checkpointer(mine, {"x": 0}, rng=False, timeout=60) as checkpointer:
            found[name] = outcome(checkpointer.resume)
    return found


def held(folder: Path, rank: int) -> Any:
    """Save where another process than rank 0 has the folder."""
    if rank:
        lock = os.open(folder / ".fastserial.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
    dist.barrier()
    with Checkpointer(folder, {"x": 0}, timeout=60) as checkpointer:
        return outcome(lambda: checkpointer.save(1))


def unlisted(folder: Path, rank: int) -> Any:
    """Look for what can be cloned where rank 1, then rank 0, cannot list the folder."""

    def fails(self: Any) -> list[int]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    found = []
    with Checkpointer(folder, {"x": 0}, incremental=True, timeout=20) as checkpointer:
        for step, failing in ((1, None), (2, 1), (3, 0)):
            with pytest.MonkeyPatch.context() as patch:
                if rank == failing:
                    patch.setattr(CheckpointFolder, "steps", fails)
                began = time.monotonic()
                found += outcome(lambda: checkpointer.save(step) and step)  # noqa: B023
                assert time.monotonic() - began < 10
            outcome(checkpointer.wait)
        found += outcome(lambda: checkpointer.save(4) and 4)
    return found


def signals(folder: Path, rank: int) -> Any:
    """End loops that look at `stop_requested` at other moments; rank 1 is signalled in step 3."""
    found = {}
    for looks in ("after the save", "before the save"):
        with Checkpointer(folder / looks, {"x": 0}, every=1000, timeout=60) as checkpointer:
            checkpointer.save_on(signal.SIGUSR1)
            for step in range(1, 500):
                time.sleep(0.02)
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
                asked = checkpointer.stop_requested
                checkpointer.save(step)
                if asked if looks == "before the save" else checkpointer.stop_requested:
                    break
            found[looks] = [step, *sorted(os.listdir(folder / looks))]
            dist.barrier()  # rank 0 removes its lock at the end
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {"early": outcome(lambda: Checkpointer(folder, {"x": 0}))}
    rank, _ = join()
    cases = (not_shared, held, unlisted, signals)
    for case in cases:
        mine = folder / case.__name__
        mine.mkdir(exist_ok=True)
        dist.barrier()
        found[case.__name__] = case(mine, rank)
    print(json.dumps(found))


main()
