"""Makes the optimizer step that would change what is being saved wait, or copy what is left.

torch calls a global hook before the step of every optimizer. It is there while something is read
in place, or a `Checkpointer` lives.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastserial.overlap.snapshot import Snapshot
from fastserial.overlap.watch import all_storages
from fastserial.patching.install import hide_from_compiler

__all__ = ["hold", "is_registered", "protect", "storages_of_optimizer", "tidy", "unhold"]

_lock = threading.RLock()
_protected: list[Snapshot] = []
_holders: weakref.WeakSet[Any] = weakref.WeakSet()  # who wants the hook to stay
_hook: Any = None
_came_by: set[int] = set()  # threads whose steps called the hook,
_inside: set[int] = set()  # and those that are in it


def protect(snapshot: Snapshot) -> None:
    """Guard a snapshot until its bytes are taken."""
    with _lock:
        if snapshot.taken:
            return
        _protected.append(snapshot)
        snapshot.on_taken = lambda: _done(snapshot)
        _register()


def hold(holder: object) -> None:
    """Let the hook stay until `unhold`: adding and removing it may make a step compile again."""
    with _lock:
        _holders.add(holder)
        _register()


def unhold(holder: object) -> None:
    """End `hold`. Idempotent."""
    with _lock:
        _holders.discard(holder)
    tidy()


def is_registered() -> bool:
    """Tell whether torch calls the hook."""
    return _hook is not None


def tidy() -> None:
    """Take the hook away if nothing needs it.

    torch walks through its hooks while it calls them, and an exception ends a step if one goes
    meanwhile. So it is the thread that trains which takes it away, outside of its steps; where
    several threads do, the hook stays, and does nothing.
    """
    global _hook
    with _lock:
        if _hook is None or _protected or _holders:
            return
        if _came_by <= {threading.get_ident()} and not _inside:
            _hook.remove()
            _hook = None
            _came_by.clear()


def _register() -> None:
    global _hook
    if _hook is None:
        hide_from_compiler()
        _hook = register_optimizer_step_pre_hook(_before_step)


def _done(snapshot: Snapshot) -> None:
    with _lock:
        _protected[:] = [other for other in _protected if other is not snapshot]


def _before_step(optimizer: Any, _arguments: Any, _named: Any) -> None:
    me = threading.get_ident()
    _came_by.add(me)
    if not _protected:
        return
    _inside.add(me)
    try:
        for snapshot in tuple(_protected):
            if snapshot.concerns(storages_of_optimizer(optimizer)):
                snapshot.release()
    finally:
        _inside.discard(me)


def storages_of_optimizer(optimizer: Any) -> Iterator[int]:
    """Yield the identities of the storages that a step may change."""
    for group in optimizer.param_groups:
        yield from all_storages(group["params"])
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from all_storages(state.values())


def _forget() -> None:
    """Begin anew in a forked child: what is pending is the parent's."""
    global _lock
    _lock = threading.RLock()
    _protected.clear()
    _inside.clear()
    _came_by.clear()


os.register_at_fork(after_in_child=_forget)
