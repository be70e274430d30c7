"""Makes the optimizer step that would change what is being saved wait, or copy what is left.

torch calls a global hook before the step of every optimizer. It is there while something is read
in place, or a `Checkpointer` lives. There is no lock, as in `pending`.
"""

from __future__ import annotations

import contextlib
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

_protected: list[Snapshot] = []
_holders: weakref.WeakSet[Any] = weakref.WeakSet()  # who wants the hook to stay
_hook: Any = None
_came_by: set[int] = set()  # threads whose steps called the hook,
_inside: set[int] = set()  # and those that are in it


def protect(snapshot: Snapshot) -> None:
    """Guard a snapshot until its bytes are taken."""
    _protected.append(snapshot)
    _register()


def hold(holder: object) -> None:
    """Let the hook stay until `unhold`: adding and removing it may make a step compile again."""
    _holders.add(holder)
    _register()


def unhold(holder: object) -> None:
    """End `hold`. Idempotent."""
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
    for snapshot in tuple(_protected):
        if snapshot.taken:
            with contextlib.suppress(ValueError):  # another thread was first
                _protected.remove(snapshot)
    if _protected or _holders or _inside or not _came_by <= {threading.get_ident()}:
        return
    hook, _hook = _hook, None  # who wants one from now on registers another
    if hook is None:
        return
    if (_protected or _holders) and _hook is None:  # who came just before found this one
        _hook = hook
        return
    hook.remove()
    _came_by.clear()


def _register() -> None:
    global _hook
    if _hook is None:
        hide_from_compiler()
        _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, _arguments: Any, _named: Any) -> None:
    me = threading.get_ident()
    _came_by.add(me)
    if not _protected:
        return
    _inside.add(me)
    try:
        for snapshot in tuple(_protected):
            if not snapshot.taken and snapshot.concerns(storages_of_optimizer(optimizer)):
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
    _protected.clear()
    _inside.clear()
    _came_by.clear()


os.register_at_fork(after_in_child=_forget)
