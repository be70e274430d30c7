"""A job's store whose calls return in time, whatever became of the process that hosts it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class BoundedStore:
    """The keys of one prefix in a job's store.

    The host of a `TCPStore` may be stopped, or its machine hang: then a call that waits for its
    answer never returns, with the GIL released. So each is made by another thread, which is left
    behind if it does not return.

    Attributes:
        limit: seconds that a call may take. After one that took longer, all fail at once.
        inner: the store itself.
        is_lost: a call took longer.
    """

    def __init__(self, prefix: str, store: Any, limit: float) -> None:
        make: Any = dist.distributed_c10d.PrefixStore
        self.inner = make(prefix, store)
        self.limit = limit
        self.is_lost = False

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it has one."""
        return bytes(self.call(self.inner.get, key))

    def set(self, key: str, value: str) -> None:
        self.call(self.inner.set, key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self.call(self.inner.add, key, amount))

    def has(self, *keys: str) -> bool:
        """Return whether all keys have a value."""
        return bool(self.call(self.inner.check, list(keys)))

    def set_first(self, key: str, value: str) -> bytes:
        """Set a key that has no value; return the value that it then has."""
        return bytes(self.call(self.inner.compare_set, key, "", value))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that may use the store.

        Raises:
            RuntimeError: the store failed, or did not answer.
        """
        if self.is_lost:
            raise RuntimeError("the job's store does not answer")
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        _worker().put((function, arguments, answer))
        try:
            value, error = answer.get(timeout=self.limit)
        except queue.Empty:
            self.is_lost = True
            _forget_worker()
            raise RuntimeError(
                f"the job's store did not answer within {self.limit:g} seconds"
            ) from None
        if error is not None:
            raise error
        return value


_Work = tuple[Callable[..., Any], tuple[Any, ...], "queue.SimpleQueue[Any]"]
_workers: dict[tuple[int, int], queue.SimpleQueue[_Work]] = {}  # by process and thread


def _worker() -> queue.SimpleQueue[_Work]:
    """Return what a thread of its own does for the calling thread."""
    key = os.getpid(), threading.get_ident()
    work = _workers.get(key)
    if work is None:
        work = queue.SimpleQueue()
        threading.Thread(target=_run, args=(work,), name="fastserial: store", daemon=True).start()
        _workers[key] = work  # now that somebody does it
    return work


def _forget_worker() -> None:
    _workers.pop((os.getpid(), threading.get_ident()), None)


def _run(work: queue.SimpleQueue[_Work]) -> None:
    while True:
        function, arguments, answer = work.get()
        try:
            answer.put((function(*arguments), None))
        except BaseException as error:
            answer.put((None, error))
        del function, arguments, answer  # the store lives as long as the job's group
