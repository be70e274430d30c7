"""The ranks' own way to talk: a gloo group beside the job's group, and errors that all learn of.

The job's group never carries our bytes, so it stays as it was whatever happens. A rank that fails
writes the cause into the job's store and closes its connections; so the others do not wait for it,
whatever they are doing, and raise the same error. After a failure the next call makes new
connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastserial.errors import DistributedError

__all__ = ["Traffic", "traffic_of"]

_HEADER = 8  # bytes of a message's length
_GRACE = 2.0  # seconds in which a rank that failed says why

_made: weakref.WeakKeyDictionary[Any, Traffic] = weakref.WeakKeyDictionary()


def traffic_of(group: dist.ProcessGroup | None, timeout: float) -> Traffic:
    """Return the connections of a group, made at the first call and after a failure. Collective.

    Args:
        group: of the job; None is all of it.
        timeout: seconds after which a rank that is not heard from counts as lost.

    Raises:
        DistributedError: a rank does not come.
        RuntimeError: there is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group first"
        )
    key: Any = group if group is not None else dist.group.WORLD
    traffic = _made.get(key)
    if traffic is None or traffic.is_broken():
        ranks = tuple(dist.get_process_group_ranks(key))
        traffic = _made[key] = Traffic(ranks, dist.get_rank(key), timeout)
    traffic.timeout = timeout
    return traffic


class Traffic:
    """Connections between the ranks of a group.

    Attributes:
        rank, size: of this process in the group, and of the group.
        ranks: the group's rank of each global rank.
        timeout: seconds after which a rank that is not heard from counts as lost.
        kept: what calls keep for the next one.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, timeout: float) -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        if store is None:
            raise RuntimeError("the process group has no store (MPI); use gloo or NCCL")
        self.rank = rank
        self.size = len(ranks)
        self.ranks = {number: index for index, number in enumerate(ranks)}
        self.timeout = timeout
        self.kept: dict[str, object] = {}
        self._closed = False
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        # A generation whose connections broke is never used again: the store remembers it.
        generation = 0
        while True:
            prefix = f"fastserial/{name}/{generation}"
            if not store.check([f"{prefix}/failed"]):
                break
            generation += 1
        self._store: Any = dist.PrefixStore(prefix, store)
        self._group: Any = None
        if self.size > 1:
            make: Any = dist.ProcessGroupGloo
            with self._blaming(None):
                self._group = make(
                    dist.PrefixStore("gloo", self._store), rank, self.size, _delta(timeout)
                )

    def is_broken(self) -> bool:
        """Return whether a rank failed, so that the connections cannot be used any more."""
        return self._closed or bool(self._store.check(["failed"]))

    def fail(self, rank: int, cause: str) -> DistributedError:
        """Tell all ranks of a failure and close the connections; return the error to raise.

        Who was first is right: the error may be an older one.
        """
        text = json.dumps([rank, cause])
        with contextlib.suppress(RuntimeError):  # the store's host may be the one that died
            told = self._store.compare_set("failed", "", text)
            rank, cause = json.loads(bytes(told).decode())
        self._closed = True
        self._group = None
        return DistributedError(rank, cause)

    def send(self, rank: int, data: torch.Tensor) -> Callable[[], None]:
        """Start to send a contiguous host tensor; call the result to wait until it is sent."""
        with self._blaming(rank):
            return self._waiting(rank, self._group.send([data], rank, 0))

    def receive(self, rank: int, data: torch.Tensor) -> Callable[[], None]:
        """Start to receive into a contiguous host tensor; call the result to wait for it."""
        with self._blaming(rank):
            return self._waiting(rank, self._group.recv([data], rank, 0))

    def consult(self, message: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Give rank 0 every rank's message, and return what it decides.

        Raises:
            DistributedError: a rank failed, died or was silent for too long.
        """
        if self.rank != 0:
            self._put(0, message)
            return self._get(0)
        answer = decide([message, *(self._get(rank) for rank in range(1, self.size))])
        for rank in range(1, self.size):
            self._put(rank, answer)
        return answer

    def agree(self, error: BaseException | None = None) -> None:
        """Return when every rank came here without an error.

        Raises:
            DistributedError: a rank came with an error, or does not come; from this rank's
                error, if it has one.
        """
        if error is not None:
            raise self.fail(self.rank, describe(error)) from error
        self.consult(b"", lambda messages: b"")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Do something that may fail on one rank: then the other ranks learn it, too.

        Raises:
            DistributedError: instead of any `Exception`. An interrupt stays one, but the others
                learn of it.
        """
        try:
            yield
        except DistributedError:
            self._closed = True
            raise
        except BaseException as error:
            failure = self.fail(self.rank, describe(error))
            if isinstance(error, Exception):
                raise failure from error
            raise

    def _put(self, rank: int, message: bytes) -> None:
        size = torch.tensor([len(message)], dtype=torch.int64)
        self.send(rank, size.view(torch.uint8))()
        if message:
            self.send(rank, torch.frombuffer(bytearray(message), dtype=torch.uint8))()

    def _get(self, rank: int) -> bytes:
        size = torch.empty(_HEADER, dtype=torch.uint8)
        self.receive(rank, size)()
        text = bytearray(int(size.view(torch.int64).item()))
        if text:
            self.receive(rank, torch.frombuffer(text, dtype=torch.uint8))()
        return bytes(text)

    def _waiting(self, rank: int, work: Any) -> Callable[[], None]:
        def wait() -> None:
            with self._blaming(rank):
                work.wait(_delta(self.timeout))

        return wait

    @contextlib.contextmanager
    def _blaming(self, rank: int | None) -> Iterator[None]:
        """Turn gloo's error into one that names the rank that failed first."""
        if self._closed:
            raise self.fail(self.rank, "it had failed before")
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._failure(rank, error, time.monotonic() - began) from error

    def _failure(self, rank: int | None, error: RuntimeError, seconds: float) -> DistributedError:
        silent = seconds > 0.9 * self.timeout
        until = time.monotonic() + (0 if silent else _GRACE)
        while time.monotonic() < until and not self._failed():
            time.sleep(0.02)
        if rank is None:
            return self.fail(self.rank, f"no connection to the other ranks: {error}")
        if silent:
            return self.fail(rank, f"not heard from for {self.timeout:g} seconds")
        return self.fail(rank, f"its process ended or closed the connection ({error})")

    def _failed(self) -> bool:
        try:
            return bool(self._store.check(["failed"]))
        except RuntimeError:  # the store's host may be the one that died
            return True


def describe(error: BaseException) -> str:
    """Return an error as one line for the other ranks."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _delta(seconds: float) -> timedelta:
    return timedelta(milliseconds=max(1, round(seconds * 1000)))
