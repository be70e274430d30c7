"""Before an optimizer step that would change what is being saved: copy the rest, or wait.

torch calls a global hook before the step of every optimizer. The first save that reads tensors in
place registers it, and it stays: torch iterates over its hooks while it calls them, so that
removing one may end a step of another thread with an error, and may make compiled steps compile
again. There is no lock, as in `pending`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastserial.overlap.snapshot import Snapshot
from fastserial.overlap.watch import all_storages
from fastserial.patching.install import hide_from_compiler

_protected: list[Snapshot] = []


def protect(snapshot: Snapshot) -> None:
    """Guard a snapshot until its bytes are taken."""
    _drop_taken()
    _protected.append(snapshot)
    watch_steps()


@functools.cache
def watch_steps() -> None:
    """Register the hook. Called early, it spares compiled steps a second compilation."""
    hide_from_compiler()
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, _arguments: Any, _named: Any) -> None:
    if not _protected:
        return
    for snapshot in tuple(_protected):
        if not snapshot.taken and snapshot.concerns(storages_of_optimizer(optimizer)):
            snapshot.release()
    _drop_taken()


def _drop_taken() -> None:
    for snapshot in tuple(_protected):
        if snapshot.taken:
            with contextlib.suppress(ValueError):  # another thread was first
                _protected.remove(snapshot)


def storages_of_optimizer(optimizer: Any) -> Iterator[int]:
    """Yield the identities of the storages that a step may change."""
    for group in optimizer.param_groups:
        yield from all_storages(group["params"])
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from all_storages(state.values())


# What is pending in a forked child is the parent's.
os.register_at_fork(after_in_child=_protected.clear)
