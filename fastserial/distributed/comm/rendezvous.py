"""How ranks find each other in the job's store, and what they write there when one fails.

The store may outlive a process group: torchrun's does, also if the job calls
`destroy_process_group` and `init_process_group` again. So the ranks first agree on a random name,
along the tree, and keep all else under it: what an earlier group has left is never read.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from fastserial.distributed.comm.call import RankCall
from fastserial.distributed.comm.links import delta
from fastserial.distributed.comm.store import BoundedStore
from fastserial.distributed.comm.tree import Neighbours, ancestors, neighbours
from fastserial.errors import ErrorKind
from fastserial.interrupts import cleanup, ours, suppress

GRACE = 2.0  # seconds in which a rank that failed says why
_FAILED = "failed"  # key of the failure
_NOBODY = "-"  # instead of the word of a rank that waits for the name
_AT_ONCE = 64  # keys that are asked for at once
_MOST = 11  # ranks that are named, and one more


class Failure(NamedTuple):
    """What a rank says of its failure.

    Attributes:
        calls: how many the rank had begun.
        call: the one that failed.
        rank: of the job, which failed first.
        cause: what happened.
        kind: of the error.
    """

    calls: int
    call: RankCall
    rank: int
    cause: str
    kind: ErrorKind


class Rendezvous:
    """One rank's view of the store.

    Attributes:
        around: the rank's neighbours.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        connect: Callable[[Any, int, int, float], Any] | None = None,
    ) -> None:
        """Ask nothing of the store yet.

        Args:
            store: the job's.
            name: of the group and what it is used for, the same on its ranks.
            connect: makes the connections, given a store, rank, size and timeout; gloo's
                by default.
        """
        self.around: Neighbours = neighbours(rank, size)
        self._rank, self._size = rank, size
        self._connect = connect or _connect_by_gloo
        self._job_store, self._prefix = store, f"fastserial/{name}"
        self._nonce = ""
        self._generation = 0
        self._limit = 0.0
        self._store: BoundedStore | None = None  # of this generation
        self._lobby: BoundedStore | None = None

    def begin(self, timeout: float) -> None:
        """Let every call to the store take so long (seconds)."""
        self._limit = timeout
        for store in (self._store, self._lobby):
            if store is not None:
                store.limit = timeout

    def hurry(self) -> None:
        """Let no call to the store take longer than a rank that failed has: its host may be it."""
        self.begin(GRACE)

    def forget(self) -> None:
        """Ask the store anew: it has failed."""
        self._store = self._lobby = None

    def renew(self) -> None:
        """Begin anew after a failure."""
        self._store = None
        self._generation += 1

    @property
    def is_lost(self) -> bool:
        """Whether the process that hosts the store does not answer."""
        return any(one is not None and one.is_lost for one in (self._store, self._lobby))

    # -- failures ------------------------------------------------------------------------------

    def failure(self) -> Failure | None:
        """Return the first failure since the ranks connected; None if there is none.

        Raises:
            RuntimeError: the store does not answer.
        """
        if not self._nonce or not self._here().has(_FAILED):
            return None
        return _failure_from(self._here().get(_FAILED))

    def has_failed(self) -> bool:
        """Return whether a rank failed, or the process that hosts the store."""
        try:
            return self.failure() is not None
        except ours(RuntimeError):
            return True

    def publish(self, failure: Failure) -> Failure:
        """Say that a rank failed; return the first failure, if the store says which that is."""
        self.hurry()
        if not self._nonce:
            return failure
        with suppress(RuntimeError):
            return _failure_from(self._here().set_first(_FAILED, json.dumps(failure)))
        return failure

    def wait_for(self, rank: int | None) -> None:
        """Say for which rank this one waits."""
        if not self._nonce:  # nobody can read it yet
            return
        with suppress(RuntimeError):
            self._here().set(f"waits/{self._rank}", "" if rank is None else str(rank))

    def last_in_line(self, rank: int) -> int:
        """Return the rank that the others wait for: a rank that waits itself is not the cause."""
        seen = {self._rank}
        if not self._nonce:
            return rank
        with suppress(RuntimeError):
            while rank not in seen and self._here().has(f"waits/{rank}"):
                seen.add(rank)
                following = self._here().get(f"waits/{rank}")
                if not following:
                    break
                rank = int(following)
        return rank

    # -- connections ---------------------------------------------------------------------------

    def connect(self) -> Any:
        """Return connections, once all ranks take part.

        Raises:
            RuntimeError: a rank does not, or it fails; or the store does not answer.
        """
        until = time.monotonic() + self._limit
        if not self._nonce:
            self._nonce = self._find_name(until)
        store = self._here()
        if store.add(f"came/{self._rank}", 1) == 1:  # it may try again
            store.add(f"on/{node_name()}", 1)
        self._wait(self._neighbours_came, until)
        outer = BoundedStore("gloo", store.inner, self._limit + GRACE)
        made = outer.call(self._connect, outer.inner, self._rank, self._size, self._limit)
        # A rank that fails closes its own. gloo does not notify one that is still connecting: it
        # would wait for the timeout.
        is_new = store.add(f"connected/{self._rank}", 1) == 1
        if is_new and store.add("connected", 1) == self._size:
            store.set("all_connected", "1")
        self._wait(lambda: store.has("all_connected"), until)
        return made

    def ranks_of_node(self) -> int:
        """Return how many ranks are on this one's node, once all are connected."""
        return self._here().add(f"on/{node_name()}", 0)

    def missing(self) -> list[int]:
        """Return the first ranks that have not begun to connect.

        Raises:
            RuntimeError: the store does not answer.
        """
        if not self._nonce:  # those above wait for the name, too, but for one
            above = ancestors(self._rank, self._size)
            return [next((one for one in above if not self._word_of(one)), 0)]
        found: list[int] = []
        for first in range(0, self._size, _AT_ONCE):
            some = range(first, min(first + _AT_ONCE, self._size))
            if not self._have_come(some):
                found += [rank for rank in some if not self._have_come([rank])]
            if len(found) >= _MOST:
                break
        return found[:_MOST]

    def _find_name(self, until: float) -> str:
        """Return the random name: rank 0 makes it, each rank tells it to those below."""
        if self.around.parent is None:
            return uuid.uuid4().hex
        word, lobby = uuid.uuid4().hex, self._outside()
        lobby.set(f"waiting/{self._rank}", word)
        with cleanup(lambda: lobby.set(f"waiting/{self._rank}", _NOBODY)):
            self._wait(lambda: lobby.has(f"name/{word}"), until)
            return lobby.get(f"name/{word}").decode()

    def _neighbours_came(self) -> bool:
        """Return whether all neighbours take part; tell the name to those that wait for it."""
        if self._have_come(self.around.all_but(None)):
            return True
        for child in self.around.children:
            if not self._have_come([child]) and (word := self._word_of(child)):
                self._outside().set(f"name/{word}", self._nonce)
        return False

    def _have_come(self, ranks: Sequence[int]) -> bool:
        return not ranks or self._here().has(*(f"came/{rank}" for rank in ranks))

    def _word_of(self, rank: int) -> str:
        """Return the word of a rank that waits for the name; empty if it does not."""
        lobby, key = self._outside(), f"waiting/{rank}"
        word = lobby.get(key).decode() if lobby.has(key) else _NOBODY
        return "" if word == _NOBODY else word

    def _wait(self, condition: Callable[[], bool], until: float) -> None:
        """Wait for a condition.

        Raises:
            RuntimeError: a rank failed, or it takes too long.
        """
        pause = 0.001
        while True:
            failed = self.has_failed()  # first: a rank that continues may fail at once
            if condition():
                return
            if failed or time.monotonic() > until:
                raise RuntimeError("another rank did not get its connections")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _here(self) -> BoundedStore:
        if self._store is None:
            prefix = f"{self._prefix}/{self._nonce}/{self._generation}"
            self._store = BoundedStore(prefix, self._job_store, self._limit)
        return self._store

    def _outside(self) -> BoundedStore:
        if self._lobby is None:
            self._lobby = BoundedStore(self._prefix, self._job_store, self._limit)
        return self._lobby


def _connect_by_gloo(store: Any, rank: int, size: int, timeout: float) -> Any:
    make: Any = dist.ProcessGroupGloo
    return make(store, rank, size, delta(timeout))


def _failure_from(text: bytes) -> Failure:
    """Return a failure from its JSON."""
    calls, (name, path, target, steps), rank, cause, kind = json.loads(text)
    call = RankCall(name, path, target, tuple((key, step) for key, step in steps))
    return Failure(calls, call, rank, cause, ErrorKind(*kind))


def node_name() -> str:
    """Return a name that no other node's kernel has."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except ours(OSError):
        boot = ""
    return boot or os.uname().nodename
