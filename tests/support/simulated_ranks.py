"""Ranks as threads of one process, with queues instead of sockets: the package's own messages.

A group is connected as gloo's are: a message waits until it is received, and whoever waits for one
of a rank that has closed its connections hears it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastserial.distributed.comm.call import RankCall
from fastserial.distributed.comm.group import RankGroup


class Network:
    """What ranks have sent, and which are gone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.changed = threading.Condition()
        self.queues: dict[tuple[Any, ...], deque[torch.Tensor]] = defaultdict(deque)
        self.gone: set[Any] = set()  # ends of connections
        self.killed: set[int] = set()
        self.ended = threading.Event()  # of all ranks that are waited for

    def connect(self, store: Any, rank: int, size: int, timeout: float) -> SimulatedGroup:
        """Return a rank's end, once all ranks have theirs."""
        generation = (store.add("came", 1) - 1) // size
        until = time.monotonic() + timeout
        while store.add("came", 0) < size * (generation + 1):
            if time.monotonic() > until:
                raise RuntimeError("not all came")
            time.sleep(0.002)
        # a name that the ranks of these connections have in common
        number = int(store.compare_set("number", "", str(id(store) + time.monotonic_ns())))
        return SimulatedGroup(self, number, rank)

    def kill(self, rank: int) -> None:
        """Close a rank's connections, and let its thread say nothing more."""
        with self.changed:
            self.killed.add(rank)
            self.changed.notify_all()
        self.ended.wait(60)

    def comm(self, rank: int, ranks: tuple[int, ...] | None = None, use: str = "") -> RankGroup:
        """Return a rank's connections, not made yet."""
        return RankGroup(ranks or tuple(range(self.size)), rank, self.store, use, self.connect)

    def run(
        self, work: Callable[[RankGroup], Any], timeout: float, but: int = -1
    ) -> list[tuple[Any, float]]:
        """Run a function on all ranks; return what each returned or raised, and its seconds.

        Args:
            but: a rank that is not waited for.
        """
        found: list[tuple[Any, float]] = [(None, 0.0)] * self.size

        def one(rank: int) -> None:
            began, comm = time.monotonic(), self.comm(rank)
            try:
                with comm.held_for(RankCall("a test")):
                    comm.begin(timeout, RankCall("a test"))
                    with comm.propagate_errors():
                        result = work(comm)
            except BaseException as error:
                result = error.with_traceback(None)
            found[rank] = result, time.monotonic() - began
            comm.links.drop()

        threads = [
            threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 60
        for rank, thread in enumerate(threads):
            if rank != but:
                thread.join(max(0.0, until - time.monotonic()))
        self.ended.set()
        return found


class SimulatedGroup:
    """One rank's end of its connections."""

    def __init__(self, network: Network, number: int, rank: int) -> None:
        self.network, self.number, self.rank = network, number, rank

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Done:
        self.check(rank)
        data, key = tensors[0].clone(), (self.number, self.rank, rank, tag)
        with self.network.changed:
            self.network.queues[key].append(data)
            self.network.changed.notify_all()
        return _Done(self, data, key)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Receipt:
        self.check(None)
        return _Receipt(self, tensors[0], rank, tag)

    def check(self, other: int | None) -> None:
        """Raise if the other one is gone."""
        if other is not None and (self.number, other) in self.network.gone | {
            (self.number, one) for one in self.network.killed
        }:
            raise RuntimeError("Connection closed by peer")

    def __del__(self) -> None:
        with self.network.changed:
            self.network.gone.add((self.number, self.rank))
            self.network.changed.notify_all()


class _Done:
    def __init__(self, group: SimulatedGroup, data: torch.Tensor, key: tuple[int, ...]) -> None:
        self.group, self.data, self.key = group, data, key

    def wait(self, timeout: timedelta) -> None:
        group, network = self.group, self.group.network
        until = time.monotonic() + timeout.total_seconds()
        with network.changed:
            while any(self.data is one for one in network.queues[self.key]):
                group.check(self.key[2])
                if time.monotonic() > until:
                    raise RuntimeError("Timed out")
                network.changed.wait(max(0.0, until - time.monotonic()))


class _Receipt:
    def __init__(self, group: SimulatedGroup, data: torch.Tensor, rank: int, tag: int) -> None:
        self.group, self.data, self.rank, self.tag = group, data, rank, tag

    def wait(self, timeout: timedelta) -> None:
        group, network = self.group, self.group.network
        key = (group.number, self.rank, group.rank, self.tag)
        until = time.monotonic() + timeout.total_seconds()
        with network.changed:
            while not network.queues[key]:
                group.check(self.rank)
                if time.monotonic() > until:
                    raise RuntimeError("Timed out")
                network.changed.wait(max(0.0, until - time.monotonic()))
            self.data.copy_(network.queues[key].popleft())
            network.changed.notify_all()
