"""Connections between ranks: a gloo group besides the job's, and errors that are raised on all.

The job's group never carries bytes of fastserial, so no failure here affects it. A rank that fails
writes the cause to the job's store and closes its connections; so the others stop waiting for it
and raise the same error. After a failure the next call makes new connections.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastserial.distributed.ranks.call import RankCall, ranks_in_words, refuse_unconnected_rank
from fastserial.distributed.ranks.store import BoundedStore
from fastserial.errors import (
    ConfigError,
    DistributedError,
    ErrorKind,
    FastserialError,
    MismatchedCallError,
    distributed_error,
    distributed_kind,
)
from fastserial.interrupts import is_foreign, ours, suppress

_FAILED = "failed"  # key of the failure in the store
_FIRST = 1024  # bytes that every message begins with: its length, and as much of it as fits
_LENGTH = 8  # bytes of the length
_ALIVE = -1  # instead of a length: the rank is alive, a message follows
_DATA, _WORDS = 0, 1  # tags: bytes of tensors, messages
_GRACE = 2.0  # seconds in which a rank that failed says why
_PATIENCE = 30.0  # seconds after which a rank says what it waits for
_REMEMBERED = 64  # calls that have ended
_log = logging.getLogger("fastserial")

# By the job's group of all ranks, and the ranks.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], Traffic]]
_made = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def collective(
    group: dist.ProcessGroup | None,
    timeout: float,
    call: RankCall,
    use: str = "",
    *,
    theirs: bool = False,
) -> Iterator[Traffic]:
    """Do something on all ranks of a group: if one fails, all raise within seconds. Collective.

    Whatever can fail on one rank alone belongs inside: options, the user's `state_dict()`, folders,
    opening files. It ends when every rank has reached its end. Do not nest two of the same use.

    Args:
        group, timeout, use: as `traffic_of`.
        call: that all ranks have to make.
        theirs: as `Traffic.together`.

    Raises:
        DistributedError: see `Traffic.together`; or a rank does not take part.
        MismatchedCallError: another rank makes another call.
        ConfigError: this process is not in the group, or in none though there are several.
        RuntimeError: the process group has no store.
    """
    traffic = traffic_of(group, timeout, call, use)
    with traffic.together(theirs):
        traffic.meet()
        yield traffic
        traffic.agree()


def path_of(path: Any, other: object, call: str) -> str:
    """Return a path as text.

    Args:
        other: what it may have been swapped with.
        call: how the call is written.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(path, str | os.PathLike) and isinstance(other, str | os.PathLike):
        raise TypeError(f"the arguments are swapped: {call}")
    text: str = os.fspath(path)
    return text


def traffic_of(
    group: dist.ProcessGroup | None, timeout: float, call: RankCall, use: str = ""
) -> Traffic:
    """Return the connections of a group, made at the first call and after a failure. Collective.

    Args:
        group: of the job; None is all of it.
        timeout: seconds after which a rank that is not heard from counts as lost.
        call: for which they are.
        use: connections of different uses are separate.

    A process without a process group is alone.

    Raises:
        ConfigError: this process is not in the group; or there is no process group, though
            several processes were launched together.
        DistributedError: a rank does not take part.
        RuntimeError: the process group has no store.
    """
    if not dist.is_initialized():
        refuse_unconnected_rank()
        stores: Any = dist
        alone = Traffic((0,), 0, stores.HashStore())
        alone.begin(timeout, call)
        return alone
    world: Any = dist.group.WORLD
    key = group if group is not None else world
    if dist.get_rank(key) < 0:
        raise ConfigError(
            f"rank {dist.get_rank()} of the job is not in `group`; only the ranks of the group "
            "make this call"
        )
    ranks = tuple(dist.get_process_group_ranks(key))
    made, name = _made.setdefault(world, {}), (use, *ranks)
    traffic = made.get(name)
    if traffic is None:
        store: Any = dist.distributed_c10d._get_default_store()
        if store is None:
            raise RuntimeError("the process group has no store (MPI); use gloo or NCCL")
        traffic = made[name] = Traffic(ranks, dist.get_rank(key), store, use)
    traffic.begin(timeout, call)
    return traffic


class Traffic:
    """Connections between the ranks of a group.

    Attributes:
        rank, size: of this process in the group, and of the group.
        ranks: the group's rank of each global rank.
        timeout: seconds after which a rank that is not heard from counts as lost.
        kept: what calls keep for the next one.
        ranks_of_node: how many ranks of the group are on this one's node.
        idle: no background save uses the connections; the next call waits for that.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, store: Any, use: str = "") -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = {number: index for index, number in enumerate(ranks)}
        self.timeout = 0.0
        self.ranks_of_node = 1
        self.kept: dict[str, object] = {}
        self.idle = threading.Event()
        self.idle.set()
        self._call = RankCall("")
        self._calls = 0
        self._ended: deque[RankCall] = deque(maxlen=_REMEMBERED)
        # On rank 0, from ranks that have begun a later call than it.
        self._early: dict[int, tuple[RankCall, list[RankCall]]] = {}
        self._generation = 0
        self._sent: list[list[Any]] = []  # transfers in progress, as the next ones
        self._awaited: list[list[Any]] = []
        self._beats: list[tuple[Any, Any]] = []  # sent, perhaps not received yet
        self._last_beat = 0.0
        self._name = use + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        self._job_store = store
        self._store: Any = None  # a `BoundedStore`
        self._group: Any = None
        self._closed = False

    def begin(self, timeout: float, call: RankCall) -> None:
        """Get ready for a collective call. Collective.

        Raises:
            DistributedError: it has failed on another rank already.
        """
        self.idle.wait()
        self._call = call
        self._calls += 1
        self._beats.clear()
        self._last_beat = time.monotonic()
        self.timeout = timeout
        self._closed = False
        try:
            self._find_connections()
        except ours(RuntimeError) as error:
            if isinstance(error, DistributedError):
                raise
            self._drop()
            self._store = None
            self._closed = True
            host = self.ranks.get(0, self.rank)
            text = f"its process may host the job's store: {error} ({self._call})"
            raise distributed_error(host, text) from error

    def _find_connections(self) -> None:
        """Use the connections of the last call, or make new ones if it failed.

        Raises:
            DistributedError: this call has failed on another rank already.
            RuntimeError: the job's store does not answer.
        """
        while True:
            if self._store is None:
                prefix = f"fastserial/{self._name}/{self._generation}"
                self._store = BoundedStore(prefix, self._job_store, self.timeout)
            self._store.limit = self.timeout
            if not self._store.has(_FAILED):
                break
            calls, failed, rank, cause, kind = json.loads(self._store.get(_FAILED))
            self._drop()  # connections that broke are never used again, and others may wait here
            if calls >= self._calls and self._call.is_same(_call_from(failed)):
                self._closed = True
                self._ended.append(self._call)
                raise distributed_error(rank, cause, ErrorKind(*kind))
            self._store = None
            self._generation += 1
        if self._group is None and self.size > 1:
            self._group = self._connect()

    def _connect(self) -> Any:
        """Return connections to all ranks, once all ranks take part.

        Raises:
            DistributedError: a rank did not.
        """
        make: Any = dist.ProcessGroupGloo
        self._store.set(f"came/{self.rank}", "1")
        self._store.add(f"on/{node_name()}", 1)
        try:
            with self._saying(self._not_come):
                store = BoundedStore("gloo", self._store.inner, self.timeout + _GRACE)
                made = store.call(make, store.inner, self.rank, self.size, _delta(self.timeout))
                self._wait_for_connected()
                self.ranks_of_node = self._store.add(f"on/{node_name()}", 0)
                return made
        except ours(RuntimeError) as error:
            self._store.limit = _GRACE
            absent: list[int] = []
            with suppress(RuntimeError):  # the store's host may be the one that died
                absent = self._not_come()
            if absent:
                text = f"it did not join {self._call} within {self.timeout:g} seconds"
                raise self.fail(absent[0], text) from error
            raise self.fail(self.rank, f"it cannot connect to the other ranks: {error}") from error

    def _not_come(self) -> list[int]:
        """Return the ranks that have not begun to connect."""
        return [rank for rank in range(self.size) if not self._store.has(f"came/{rank}")]

    @contextlib.contextmanager
    def _saying(self, awaited: Callable[[], list[int]]) -> Iterator[None]:
        """Log, after a while, for which ranks this one waits, and in which call.

        Args:
            awaited: returns the ranks.
        """
        if self.timeout <= _PATIENCE:
            yield
            return

        def say() -> None:
            with suppress(RuntimeError):  # of the store
                _log.warning(
                    "rank %d has waited for %s for %g seconds, in %s; every rank has to make this "
                    "call. It fails after %g seconds",
                    self.rank, ranks_in_words(awaited()), _PATIENCE, self._call, self.timeout,
                )  # fmt: skip

        timer = threading.Timer(_PATIENCE, say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def meet(self) -> None:
        """Find out whether all ranks make the same call. Collective.

        Ranks that make different ones all raise, and so does whoever comes to a call that has
        ended without it. A rank that is ahead waits for the others.

        Raises:
            MismatchedCallError: a rank makes another call. The connections stay as they are.
        """
        call = self._call
        if self.size == 1:
            return
        ended = list(self._ended)
        self._ended.append(call)
        if self.rank:
            with self._saying(lambda: [0]):
                self._wait_for(self._post([0], pickle.dumps((call, ended))))
                self._calls, verdict = pickle.loads(self._begin_get(0)())
            if verdict is not None:
                raise MismatchedCallError(*verdict)
            return
        met: list[int] = []
        awaited = list(range(1, self.size))
        with self._saying(lambda: awaited[:1]):
            while awaited:
                rank = awaited[0]
                theirs, before = self._early.pop(rank, None) or pickle.loads(
                    self._begin_get(rank)()
                )
                if theirs.is_same(call):
                    met.append(awaited.pop(0))
                    continue
                here, there = _is_among(theirs, ended), _is_among(call, before)
                if here and not there:  # it is late: it alone raises, and comes again
                    self._answer([rank], (rank, _late(0, theirs, call)))
                    continue
                if there and not here:
                    self._early[rank] = theirs, before
                    verdict = (0, _late(rank, call, theirs))
                else:
                    met.append(rank)
                    verdict = (
                        rank,
                        f"it called {theirs} while rank 0 called {call}. {_SAME_CALLS}",
                    )
                self._answer(met, verdict)
                raise MismatchedCallError(*verdict)
        self._answer(met, None)

    def _answer(self, ranks: Iterable[int], verdict: tuple[int, str] | None) -> None:
        """Send the number of this call, and whether the ranks make the same one."""
        self._wait_for(self._post(ranks, pickle.dumps((self._calls, verdict))))

    def _wait_for_connected(self) -> None:
        """Wait until the others have their connections, too.

        A rank that fails closes its own. gloo does not notify a rank that is still connecting: it
        would wait for the timeout.
        """
        until = time.monotonic() + self.timeout
        if self._store.add("connected", 1) == self.size:
            self._store.set("all_connected", "1")
        while True:
            failed = self._failed()  # first: a rank that continues may fail at once
            if self._store.has("all_connected"):
                return
            if failed or time.monotonic() > until:
                raise RuntimeError("another rank did not get its connections")
            time.sleep(0.002)

    def fail(self, rank: int, cause: str, kind: ErrorKind | None = None) -> DistributedError:
        """Publish a failure and close the connections; return the error to raise.

        The first failure counts: the error may be an older one.

        Args:
            kind: of the error, see `distributed_kind`.
        """
        kind = kind or ErrorKind()
        text = json.dumps([self._calls, self._call, rank, cause, kind])
        self._store.limit = _GRACE
        with suppress(RuntimeError):  # the store's host may be the one that died
            _, _, rank, cause, found = json.loads(self._store.set_first(_FAILED, text))
            kind = ErrorKind(*found)
        self._closed = True
        self._finish_sending()
        self._drop()
        return distributed_error(rank, cause, kind)

    def _finish_sending(self) -> None:
        """Wait for messages that are being sent, for `_GRACE` seconds.

        gloo does not notify a rank that is receiving one that the sender has closed the
        connection: it would wait until the timeout.
        """
        until = time.monotonic() + _GRACE
        for work in [work for holder in self._sent for work in holder]:
            with suppress(RuntimeError):
                work.wait(_delta(until - time.monotonic()))

    def _drop(self) -> None:
        """Close the connections."""
        for holder in (*self._sent, *self._awaited):
            holder.clear()
        self._sent.clear()
        self._awaited.clear()
        self._beats.clear()
        self._early.clear()
        self._group = None

    def send(self, rank: int, data: torch.Tensor) -> Callable[[], None]:
        """Start to send a contiguous host tensor; call the result to wait until it is sent."""
        return self._start(rank, data, _DATA, out=True)

    def receive(self, rank: int, data: torch.Tensor) -> Callable[[], None]:
        """Start to receive into a contiguous host tensor; call the result to wait for it."""
        return self._start(rank, data, _DATA, out=False)

    def alive(self) -> None:
        """Show the others that this rank is alive: call it often during long work."""
        now = time.monotonic()
        if self.size == 1 or now - self._last_beat < self.timeout / 4:
            return
        self._last_beat = now
        for rank in [0] if self.rank else range(1, self.size):
            beat = _first(_ALIVE, b"")
            with self._blaming(rank):
                self._beats.append((beat, self._group.send([beat], rank, _WORDS)))

    def decide(self, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """Give rank 0 every rank's value, and return what it makes of them, on all ranks.

        Raises:
            DistributedError: a rank failed, died or was silent for too long.
        """
        if self.rank != 0:
            self._wait_for(self._post([0], pickle.dumps(value)))
            return pickle.loads(self._begin_get(0)())
        others = [self._begin_get(rank) for rank in range(1, self.size)]
        every = [value, *(pickle.loads(finish()) for finish in others)]
        answer = pickle.dumps(decision(every))
        self._wait_for(self._post(range(1, self.size), answer))
        return pickle.loads(answer)

    def agree(self) -> None:
        """Return when every rank got here without an error.

        Raises:
            DistributedError: a rank failed, or does not get here.
        """
        self.decide(None, lambda _: None)

    @contextlib.contextmanager
    def together(self, theirs: bool = False) -> Iterator[None]:
        """Do something that may fail on one rank: then it is an error on all.

        Args:
            theirs: it is the user's code: all its errors are raised as they are on this rank, and
                but for fastserial's own as nothing but a `DistributedError` on the others.

        Raises:
            DistributedError: another rank failed, or this one with an error of fastserial's or of
                the operating system. Errors of other code, and interrupts, are raised as they are.
        """
        try:
            yield
        except MismatchedCallError:
            raise
        except DistributedError as error:
            if not self._closed:  # it is of other connections
                self.fail(error.rank, error.cause, distributed_kind(error))
            raise
        except BaseException as error:
            is_users = theirs and not isinstance(error, FastserialError)
            kind = ErrorKind() if is_users else distributed_kind(error)
            failure = self.fail(self.rank, _in_words(error), kind)
            known = isinstance(error, FastserialError | OSError)
            if known and not theirs and not is_foreign(error):
                raise failure from error
            raise

    def _post(self, ranks: Iterable[int], message: bytes) -> list[Callable[[], None]]:
        """Start to send a message; call what is returned to wait until it is sent."""
        parts = [_first(len(message), message)]
        rest = bytearray(message[_FIRST - _LENGTH :])
        if rest:
            parts.append(torch.frombuffer(rest, dtype=torch.uint8))
        return [self._start(rank, part, _WORDS, out=True) for rank in ranks for part in parts]

    @staticmethod
    def _wait_for(sent: Iterable[Callable[[], None]]) -> None:
        for wait in sent:
            wait()

    def _begin_get(self, rank: int) -> Callable[[], bytes]:
        """Start to receive a message; call the result to wait for it."""
        text = bytearray(_FIRST)
        first = torch.frombuffer(text, dtype=torch.uint8)
        begun = self._start(rank, first, _WORDS, out=False)

        def finish() -> bytes:
            begun()
            while (length := int.from_bytes(text[:_LENGTH], "little", signed=True)) == _ALIVE:
                self._start(rank, first, _WORDS, out=False)()
            rest = bytearray(max(0, length - (_FIRST - _LENGTH)))
            if rest:
                self._start(rank, torch.frombuffer(rest, dtype=torch.uint8), _WORDS, out=False)()
            return bytes(text[_LENGTH : _LENGTH + length]) + rest

        return finish

    def _start(self, rank: int, data: torch.Tensor, tag: int, out: bool) -> Callable[[], None]:
        """Start to send or to receive; call the result to wait until it is done.

        A transfer in progress keeps the connections open, and the tracebacks of errors keep
        frames; so no frame holds it, but a list that `fail` empties.
        """
        with self._blaming(rank):
            how = "send" if out else "recv"
            holder = [getattr(self._group, how)([data], rank, tag)]
        under_way = self._sent if out else self._awaited
        under_way.append(holder)

        def wait() -> None:
            with self._blaming(rank):
                holder[0].wait(_delta(self.timeout))
            holder.clear()
            under_way.remove(holder)

        return wait

    @contextlib.contextmanager
    def _blaming(self, rank: int) -> Iterator[None]:
        """Turn gloo's error into one that names the rank that failed first."""
        if self._closed:
            raise self.fail(self.rank, "it had failed before")
        began = time.monotonic()
        try:
            yield
        except ours(RuntimeError) as error:
            raise self._failure(rank, error, time.monotonic() - began) from error

    def _failure(self, rank: int, error: RuntimeError, seconds: float) -> DistributedError:
        silent = seconds > 0.9 * self.timeout
        self._store.limit = _GRACE
        if silent:
            with suppress(RuntimeError):
                self._store.set(f"waits/{self.rank}", str(rank))
        until = time.monotonic() + (min(_GRACE, self.timeout / 2) if silent else _GRACE)
        while time.monotonic() < until and not self._failed():
            time.sleep(0.02)
        if silent:
            text = f"not heard from for {self.timeout:g} seconds"
            return self.fail(self._last_in_line(rank), text)
        return self.fail(rank, f"its process ended or closed the connection ({error})")

    def _last_in_line(self, rank: int) -> int:
        """Return the rank that the others wait for: a rank that waits itself is not the cause."""
        seen = {self.rank}
        with suppress(RuntimeError):
            while rank not in seen and self._store.has(f"waits/{rank}"):
                seen.add(rank)
                rank = int(self._store.get(f"waits/{rank}"))
        return rank

    def _failed(self) -> bool:
        try:
            return bool(self._store.has(_FAILED))
        except ours(RuntimeError):  # the store's host may be the one that died
            return True


_SAME_CALLS = "Every rank has to make the same calls in the same order"


def _is_among(call: RankCall, calls: Iterable[RankCall]) -> bool:
    return any(call.is_same(one) for one in calls)


def _late(other: int, call: RankCall, now: RankCall) -> str:
    """Return why a rank's call has no partner."""
    return (
        f"it called {call}, which has ended on rank {other}: that one called {now}. {_SAME_CALLS}"
    )


def _call_from(found: list[Any]) -> RankCall:
    """Return a call from its JSON."""
    name, path, target, steps = found
    return RankCall(name, path, target, tuple((key, step) for key, step in steps))


def _first(length: int, message: bytes) -> torch.Tensor:
    """Return what a message begins with."""
    text = bytearray(_FIRST)
    text[:_LENGTH] = length.to_bytes(_LENGTH, "little", signed=True)
    here = message[: _FIRST - _LENGTH]
    text[_LENGTH : _LENGTH + len(here)] = here
    return torch.frombuffer(text, dtype=torch.uint8)


def _in_words(error: BaseException) -> str:
    """Return an error as text for the other ranks."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _delta(seconds: float) -> timedelta:
    return timedelta(milliseconds=max(1, round(seconds * 1000)))


def node_name() -> str:
    """Return a name that no other node's kernel has."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except ours(OSError):
        boot = ""
    return boot or os.uname().nodename


@atexit.register
def _close() -> None:
    """Close all connections while the interpreter is whole.

    A thread of gloo's that lets go of a tensor later than that ends the process by SIGABRT.
    """
    for made in list(_made.values()):
        for traffic in made.values():
            traffic._drop()
    _made.clear()
