"""A rank: what Checkpointers make of folders and signals that the ranks do not share.

Arguments: folder. Prints one JSON object: what each case came to on this rank.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.ranks import join

from fastserial import Checkpointer


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


def main() -> None:
    rank, _ = join()
    folder = Path(sys.argv[1])
    cases = (not_shared,)
    found = {}
    for case in cases:
        mine = folder / case.__name__
        mine.mkdir(exist_ok=True)
        found[case.__name__] = case(mine, rank)
    print(json.dumps(found))


main()
