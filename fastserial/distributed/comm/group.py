"""Messages between the ranks of a group, and errors that are raised on all of them.

The job's group never carries bytes of fastserial, so no failure here affects it. A rank that fails
writes the cause to the job's store and closes its connections; so the others stop waiting for it
and raise the same error. After a failure the next call makes new connections.

Who waits for whom: in a collective step (`reduce`) a rank waits for each of those below it in the
tree, then for the answer of the one above. Whoever is at work meanwhile sends heartbeats, and who
waits passes them on to its other neighbours, never back: so a rank that hears nothing from a
neighbour knows that nobody is at work beyond it. It then names the last one of those that wait.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fastserial.distributed.comm.call import RankCall, ranks_in_words, refuse_unconnected_rank
from fastserial.distributed.comm.links import Links
from fastserial.distributed.comm.patience import call_after
from fastserial.distributed.comm.rendezvous import GRACE, Failure, Rendezvous, node_name
from fastserial.errors import (
    ConfigError,
    DistributedError,
    ErrorKind,
    FastserialError,
    MismatchedCallError,
    distributed_error,
    distributed_kind,
)
from fastserial.interrupts import Locked, cleanup, is_foreign, ours, suppress

__all__ = ["RankGroup", "collective", "node_name", "path_of", "rank_group_of"]

_PATIENCE = 30.0  # seconds after which a rank says what it waits for
_REMEMBERED = 64  # calls that have ended
_log = logging.getLogger("fastserial")
_Part = TypeVar("_Part")

# By the job's group of all ranks, and the ranks.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], RankGroup]]
_made = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def collective(
    group: dist.ProcessGroup | None,
    timeout: float,
    call: RankCall,
    use: str = "",
    *,
    user_code: bool = False,
) -> Iterator[RankGroup]:
    """Do something on all ranks of a group: if one fails, all raise within seconds. Collective.

    Whatever can fail on one rank alone belongs inside: options, the user's `state_dict()`, folders,
    opening files. It ends when every rank has reached its end.

    Args:
        group, use: as `rank_group_of`.
        timeout: seconds after which a rank that is not heard from counts as lost.
        call: that all ranks have to make.
        user_code: as `RankGroup.propagate_errors`.

    Raises:
        DistributedError: see `RankGroup.propagate_errors`; or a rank does not take part; or this
            one makes the call in the middle of another one of the same use.
        MismatchedCallError: another rank makes another call.
        ConfigError: this process is not in the group, or in none though there are several.
        RuntimeError: the process group has no store.
    """
    comm = rank_group_of(group, use)
    with comm.held_for(call):
        comm.begin(timeout, call)
        with comm.propagate_errors(user_code):
            comm.match_calls()
            yield comm
            comm.barrier()


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


def rank_group_of(group: dist.ProcessGroup | None, use: str = "") -> RankGroup:
    """Return the connections of a group; `RankGroup.begin` makes them, and anew after a failure.

    Args:
        group: of the job; None is all of it.
        use: connections of different uses are separate.

    A process without a process group is alone.

    Raises:
        ConfigError: this process is not in the group; or there is no process group, though
            several processes were launched together.
        RuntimeError: the process group has no store.
    """
    if not dist.is_initialized():
        refuse_unconnected_rank()
        stores: Any = dist
        return RankGroup((0,), 0, stores.HashStore())
    world: Any = dist.group.WORLD
    key = group if group is not None else world
    if dist.get_rank(key) < 0:
        raise ConfigError(
            f"rank {dist.get_rank()} of the job is not in `group`; only the ranks of the group "
            "make this call"
        )
    ranks = tuple(dist.get_process_group_ranks(key))
    made, name = _made.setdefault(world, {}), (use, *ranks)
    comm = made.get(name)
    if comm is None:
        store: Any = dist.distributed_c10d._get_default_store()
        if store is None:
            raise RuntimeError("the process group has no store (MPI); use gloo or NCCL")
        comm = made.setdefault(name, RankGroup(ranks, dist.get_rank(key), store, use))
    return comm


class Arrival(NamedTuple):
    """What a rank says when it comes to a call.

    Attributes:
        call: the call.
        ended: calls before it.
        refused: why it has no partner, if one of those below found that: then the rank has raised.
    """

    call: RankCall
    ended: list[RankCall]
    refused: tuple[int, str] | None = None


class RankGroup:
    """Connections between the ranks of a group.

    Attributes:
        rank, size: of this process in the group, and of the group.
        ranks: the group's rank of each rank of the job.
        jobs: the job's rank of each rank of the group: errors and reports name these.
        kept: what calls keep for the next one.
        idle: no background save uses the connections; the next call waits for that.
        links: to the other ranks.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        store: Any,
        use: str = "",
        connect: Callable[[Any, int, int, float], Any] | None = None,
    ) -> None:
        """Prepare; see `Rendezvous`."""
        self.rank = rank
        self.size = len(ranks)
        self.jobs = ranks
        self.ranks = {number: index for index, number in enumerate(ranks)}
        self.kept: dict[str, object] = {}
        self.idle = threading.Event()
        self.idle.set()
        name = use + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        self._rendezvous = Rendezvous(store, name, rank, self.size, connect)
        self._parent, self._children = self._rendezvous.around
        self.links = Links(self._blame, self._waiting)
        self.send, self.receive = self.links.send, self.links.receive
        self._call = RankCall("")
        self._calls = 0
        self._ended: deque[RankCall] = deque(maxlen=_REMEMBERED)
        self._early: dict[int, Arrival] = {}  # of ranks that have begun a later call than this one
        self._alike: DistributedError | None = None  # that all ranks which have to hear it raise
        self._closed = False
        self._lock, self._depth = threading.RLock(), 0
        self._reserved = 0  # the thread that is about to hand the connections over

    @property
    def ranks_of_node(self) -> int:
        """How many ranks of the group are on this one's node."""
        return self._rendezvous.ranks_of_node() if self.size > 1 else 1

    @property
    def job_rank(self) -> int:
        """This process in the job."""
        return self.jobs[self.rank]

    @contextlib.contextmanager
    def held_for(self, call: RankCall) -> Iterator[None]:
        """Let no other call use the connections: one of another thread waits.

        Raises:
            DistributedError: this thread is in the middle of a call.
        """
        with Locked(self._lock):
            if self._depth or self._reserved == threading.get_ident():
                text = (
                    f"it called {call} in the middle of {self._call}, as a signal handler or a "
                    "`state_dict()` may: only remember there that a save is wanted, and call it "
                    "when the first call has ended"
                )
                raise distributed_error(self.job_rank, text)
            try:  # nothing is called between these lines: no signal handler can leave it held
                self._depth = 1
                yield
            finally:
                self._depth, self._alike = 0, None  # whose frames hold the state

    def reserve(self) -> None:
        """Let the calls of other threads wait until `release`; those of this thread fail."""
        self._reserved = threading.get_ident()
        self.idle.clear()

    def hand_over(self) -> None:
        """Let this thread's next call wait, too: from now on another thread uses them."""
        self._reserved = 0

    def release(self) -> None:
        """Let the next call begin. Idempotent."""
        self._reserved = 0
        self.idle.set()

    def begin(self, timeout: float, call: RankCall) -> None:
        """Get ready for a collective call. Collective.

        Raises:
            DistributedError: it has failed on another rank already.
        """
        self.idle.wait()
        self._call = call
        self._calls += 1
        self.timeout = self.links.timeout = timeout
        self.links.forget_beats()
        if self._rendezvous.is_lost:  # it may only have been slow while the last call failed
            self._rendezvous.forget()
        self._rendezvous.begin(timeout)
        self._closed, self._alike = False, None
        try:
            self._find_connections()
        except ours(RuntimeError) as error:
            if isinstance(error, DistributedError):
                raise
            self._drop()
            self._rendezvous.forget()
            self._closed = True
            text = f"its process may host the job's store: {error} ({self._call})"
            raise distributed_error(0, text) from error

    def _find_connections(self) -> None:
        """Use the connections of the last call, or make new ones if it failed.

        Raises:
            DistributedError: this call has failed on another rank already.
            RuntimeError: the job's store does not answer.
        """
        while (failure := self._rendezvous.failure()) is not None:
            self._drop()  # connections that broke are never used again, and others may wait here
            if failure.calls >= self._calls and self._call.is_same(failure.call):
                self._closed = True
                self._ended.append(self._call)
                raise distributed_error(failure.rank, failure.cause, failure.kind)
            self._rendezvous.renew()
        if self.links.group is None and self.size > 1:
            self.links.group = self._connect()

    def _connect(self) -> Any:
        """Return connections to all ranks, once all ranks take part.

        Raises:
            DistributedError: a rank did not.
            RuntimeError: the job's store does not answer.
        """
        try:
            with self._saying(self._rendezvous.missing):
                return self._rendezvous.connect()
        except ours(RuntimeError) as error:
            if self._rendezvous.is_lost:
                raise
            self._rendezvous.hurry()
            absent: list[int] = []
            with suppress(RuntimeError):  # the store's host may be the one that died
                absent = self._rendezvous.missing()
            if absent:
                text = f"it did not join {self._call} within {self.timeout:g} seconds"
                raise self.fail(self.jobs[absent[0]], text) from error
            text = f"it cannot connect to the other ranks: {error}"
            raise self.fail(self.job_rank, text) from error

    @contextlib.contextmanager
    def _saying(self, awaited: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Log, after a while, for which ranks this one waits, and in which call.

        Args:
            awaited: returns the ranks.
        """

        def say() -> None:
            with suppress(RuntimeError):  # of the store
                ranks = awaited()
                if not ranks:  # all have come, and are not connected yet
                    return
                last = [self._rendezvous.last_in_line(rank) for rank in ranks]
                _log.warning(
                    "rank %d has waited for %s for %g seconds, in %s; every rank has to make this "
                    "call. It fails after %g seconds",
                    self.job_rank, self.in_words(last), _PATIENCE, self._call, self.timeout,
                )  # fmt: skip

        if self.timeout <= _PATIENCE:
            yield
            return
        with cleanup(call_after(_PATIENCE, say)):
            yield

    @contextlib.contextmanager
    def _waiting(self, rank: int) -> Iterator[None]:
        """Let the others know, after a while, that this rank waits for another.

        Who waits for this one since earlier than that has to name the other. After an error it
        stays in the store: others may still ask.
        """
        lock, waits, told = threading.Lock(), True, False

        def tell() -> None:
            nonlocal told
            with Locked(lock):
                if waits:
                    told = True
                    self._rendezvous.wait_for(rank)

        with cleanup(call_after(min(_PATIENCE / 2, self.timeout / 8), tell)):
            yield
        waits = False
        with Locked(lock):
            if told:
                self._rendezvous.wait_for(None)

    def in_words(self, ranks: Iterable[int]) -> str:
        """Return ranks of the group as the job calls them, such as "ranks 1, 2"."""
        return ranks_in_words(list(dict.fromkeys(self.jobs[rank] for rank in ranks)))

    def match_calls(self) -> None:
        """Find out whether all ranks make the same call. Collective.

        Each rank compares its call with those of the ranks below it. Ranks that make different ones
        all raise, and so does whoever comes to a call that has ended without it. A rank that is
        ahead waits for the others.

        Raises:
            MismatchedCallError: a rank makes another call. The connections stay as they are.
        """
        mine = Arrival(self._call, list(self._ended))
        if self.size == 1:
            return
        self._ended.append(self._call)
        met: list[int] = []
        awaited = list(self._children)
        refused: tuple[int, str] | None = None
        with self._saying(lambda: awaited[:1] or self._above()):
            while awaited:  # all of them, whatever the first ones say: they wait for an answer
                rank = awaited[0]
                theirs = self._early.pop(rank, None) or self._arrival_of(rank)
                here, there = _is_among(theirs.call, mine), _is_among(mine.call, theirs)
                is_same = theirs.call.is_same(mine.call)
                why = theirs.refused
                if not is_same and here and not there:
                    # It is late: it alone raises, and comes again, unless this call fails anyway.
                    text = self._late(self.rank, theirs.call, mine.call)
                    if theirs.refused is None:
                        self._answer([rank], (self.jobs[rank], text))
                    if refused is None:
                        continue
                elif not is_same and there and not here:
                    self._early[rank] = theirs
                    why = self.job_rank, self._late(rank, mine.call, theirs.call)
                else:
                    met += [rank] if theirs.refused is None else []
                    if not is_same:
                        text = f"{theirs.call} while rank {self.job_rank} called {mine.call}"
                        why = self.jobs[rank], f"it called {text}. {_SAME_CALLS}"
                awaited.pop(0)
                refused = refused or why
            if self._parent is not None:
                arrival = mine._replace(refused=refused)
                self.links.post([self._parent], pickle.dumps(arrival))
                if refused is None:
                    self._calls, refused = pickle.loads(self._begin_get(self._parent)())
        self._answer(met, refused)
        if refused is not None:
            raise self.alike(MismatchedCallError(*refused))

    def _above(self) -> list[int]:
        return [self.rank if self._parent is None else self._parent]

    def _arrival_of(self, rank: int) -> Arrival:
        found: Arrival = pickle.loads(self._begin_get(rank)())
        return found

    def _answer(self, ranks: Sequence[int], refused: tuple[int, str] | None) -> None:
        """Send the number of this call, and whether the ranks make the same one."""
        self.links.post(ranks, pickle.dumps((self._calls, refused)))

    def _late(self, other: int, call: RankCall, now: RankCall) -> str:
        """Return why a rank's call has no partner."""
        return (
            f"it called {call}, which has ended on rank {self.jobs[other]}: that one called {now}. "
            f"{_SAME_CALLS}"
        )

    def alike(self, error: DistributedError) -> DistributedError:
        """Return an error to raise that every rank raises which has to: the connections stay."""
        self._alike = error
        return error

    def fail(self, rank: int, cause: str, kind: ErrorKind | None = None) -> DistributedError:
        """Publish a failure and close the connections; return the error to raise.

        The first failure counts: the error may be an older one.

        Args:
            rank: of the job.
            kind: of the error, see `distributed_kind`.
        """
        mine = Failure(self._calls, self._call, rank, cause, kind or ErrorKind())
        first = self._rendezvous.publish(mine)
        self._closed = True
        self.links.finish_sending(GRACE)
        self._drop()
        return distributed_error(first.rank, first.cause, first.kind)

    def _drop(self) -> None:
        """Close the connections."""
        self.links.drop()
        self._early.clear()

    def heartbeat(self) -> None:
        """Show the others that this rank is alive: call it often during long work."""
        self.links.beat(self._rendezvous.around.all_but(None), self.timeout / 4)

    def _pass_on(self, rank: int) -> None:
        """Pass a heartbeat on to those that may wait for this rank."""
        # more often than they are sent, so that none is left out because it comes a little early
        self.links.beat(self._rendezvous.around.all_but(rank), self.timeout / 8)

    def _begin_get(self, rank: int) -> Callable[[], bytes]:
        return self.links.begin_get(rank, self._pass_on)

    def reduce_on_root(
        self,
        value: _Part,
        combine: Callable[[list[_Part]], _Part],
        decision: Callable[[_Part], Any],
    ) -> Any:
        """Give rank 0 what all ranks' values make together, and return its decision, on all ranks.

            most = comm.reduce_on_root(len(data), max, lambda largest: largest)

        Args:
            combine: makes one value of those of some ranks, in their order. What it returns is to
                be no larger than a rank's own value: it is sent on as one.

        Raises:
            DistributedError: a rank failed, died or was silent for too long.
        """
        others = [self._begin_get(rank) for rank in self._children]
        if others:
            value = combine([value, *(pickle.loads(finish()) for finish in others)])
        if self._parent is None:
            answer = pickle.dumps(decision(value))
        else:
            finish = self.links.begin_post([self._parent], pickle.dumps(value))
            answer = self._begin_get(self._parent)()  # first: heartbeats come before the answer
            finish()
        self.links.post(self._children, answer)
        return pickle.loads(answer)

    def decide_on_root(self, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """Give rank 0 every rank's value, and return what it makes of them, on all ranks.

        Rank 0 holds all of them: `reduce` is for what need not be listed.

        Raises:
            DistributedError: a rank failed, died or was silent for too long.
        """
        return self.reduce_on_root(
            [pickle.dumps(value)],
            lambda some: [one for each in some for one in each],
            lambda every: decision([pickle.loads(one) for one in every]),
        )

    def barrier(self) -> None:
        """Return when every rank got here without an error.

        Raises:
            DistributedError: a rank failed, or does not get here.
        """
        self.reduce_on_root(None, lambda _: None, lambda _: None)

    @contextlib.contextmanager
    def propagate_errors(self, user_code: bool = False) -> Iterator[None]:
        """Do something that may fail on one rank: then it is an error on all.

        Args:
            user_code: the body is the user's: all its errors are raised as they are on this rank,
                and but for fastserial's own as nothing but a `DistributedError` on the others.

        Raises:
            DistributedError: another rank failed, or this one with an error of fastserial's or of
                the operating system. Errors of other code, and interrupts, are raised as they are.
        """
        try:
            yield
        except DistributedError as error:
            # the rest of them is of other connections
            if error is not self._alike and not self._closed:
                self.fail(error.rank, error.cause, distributed_kind(error))
            raise
        except BaseException as error:
            is_users = user_code and not isinstance(error, FastserialError)
            kind = ErrorKind() if is_users else distributed_kind(error)
            failure = self.fail(self.job_rank, _in_words(error), kind)
            known = isinstance(error, FastserialError | OSError)
            if known and not user_code and not is_foreign(error):
                raise failure from error
            raise

    def _blame(self, rank: int, error: RuntimeError, seconds: float) -> DistributedError:
        """Return gloo's error about a neighbour as one that names the rank that failed first."""
        if rank < 0:
            return self.fail(self.job_rank, str(error))
        silent = seconds > 0.9 * self.timeout
        self._rendezvous.hurry()
        if silent:
            self._rendezvous.wait_for(rank)
        until = time.monotonic() + (min(GRACE, self.timeout / 2) if silent else GRACE)
        while time.monotonic() < until and not self._rendezvous.has_failed():
            time.sleep(0.02)
        if silent:
            text = f"not heard from for {self.timeout:g} seconds"
            return self.fail(self.jobs[self._rendezvous.last_in_line(rank)], text)
        text = f"its process ended or closed the connection ({error})"
        return self.fail(self.jobs[rank], text)


_SAME_CALLS = "Every rank has to make the same calls in the same order"


def _is_among(call: RankCall, arrival: Arrival) -> bool:
    """Return whether a call has ended on a rank."""
    return any(call.is_same(one) for one in arrival.ended)


def _in_words(error: BaseException) -> str:
    """Return an error as text for the other ranks."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@atexit.register
def _close() -> None:
    """Close all connections while the interpreter is whole.

    A thread of gloo's that lets go of a tensor later than that ends the process by SIGABRT.
    """
    for made in list(_made.values()):
        for comm in made.values():
            comm._drop()
    _made.clear()
