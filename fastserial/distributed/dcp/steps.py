"""The collective step of DCP that is going on: planners and storages are not told of it."""

from __future__ import annotations

import sys

from torch.distributed.checkpoint.utils import _DistWrapper

__all__ = ["is_called_by_dcp", "wrapper_of_step"]


def is_called_by_dcp() -> bool:
    """Return whether DCP itself calls a storage's `finish`, which asks; not one around it."""
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_code.co_name == "finish_checkpoint"


def wrapper_of_step(name: str) -> _DistWrapper | None:
    """Return what DCP does a step with, None outside of such a step.

    Args:
        name: of the step: `reduce_scatter` (plans), `all_reduce` (the end of a save).
    """
    frame = sys._getframe(1)
    found = None
    while found is None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == name:
            found = frame.f_locals.get("self")
    return found if isinstance(found, _DistWrapper) else None
