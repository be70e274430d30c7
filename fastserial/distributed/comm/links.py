"""Messages and bytes between this rank and others, over one gloo group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch

from fastserial.errors import DistributedError
from fastserial.interrupts import ours, suppress

_FIRST = 1024  # bytes that every message begins with: its length, and as much of it as fits
_LENGTH = 8  # bytes of the length
_BEAT = -1  # instead of a length: somebody beyond the sender is at work, a message follows
_DATA, _WORDS = 0, 1  # tags: bytes of tensors, messages

# The error to raise, given the other rank, gloo's error and for how many seconds it was waited for.
Blame = Callable[[int, RuntimeError, float], DistributedError]
# In which a rank is waited for.
Waiting = Callable[[int], AbstractContextManager[None]]


class Links:
    """Connections to other ranks, until one of them fails.

    Attributes:
        group: gloo's, None if there is none.
        timeout: seconds after which a rank that is not heard from counts as lost.
        sent_bytes, messages: what this rank has sent.
    """

    def __init__(self, blame: Blame, waiting: Waiting) -> None:
        self.group: Any = None
        self.timeout = 0.0
        self.sent_bytes = self.messages = 0
        self._blame, self._waiting = blame, waiting
        self._sent: list[list[Any]] = []  # transfers in progress, as the next ones
        self._awaited: list[list[Any]] = []
        self._beats: list[tuple[Any, Any]] = []  # sent, perhaps not received yet
        self._beaten: dict[int, float] = {}  # when a rank was sent the last one
        self._since = 0.0

    def send(self, rank: int, data: torch.Tensor) -> Callable[[], None]:
        """Start to send a contiguous host tensor; call the result to wait until it is sent."""
        return self._start(rank, data, _DATA, out=True)

    def receive(self, rank: int, data: torch.Tensor) -> Callable[[], None]:
        """Start to receive into a contiguous host tensor; call the result to wait for it."""
        return self._start(rank, data, _DATA, out=False)

    def post(self, ranks: Iterable[int], message: bytes) -> None:
        """Send a message to some ranks, and return when it is sent."""
        self.begin_post(ranks, message)()

    def begin_post(self, ranks: Iterable[int], message: bytes) -> Callable[[], None]:
        """Start to send a message to some ranks; call the result to wait until it is sent.

        A rank that works takes it late; until then its heartbeats come, if one is received.
        """
        parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in framed(message)]
        sent = [
            (part, self._start(rank, part, _WORDS, out=True)) for rank in ranks for part in parts
        ]

        def finish() -> None:
            for _, wait in sent:
                wait()

        return finish

    def begin_get(self, rank: int, beats: Callable[[int], object]) -> Callable[[], bytes]:
        """Start to receive a message; call the result to wait for it.

        Args:
            beats: called with the rank at each of its heartbeats.
        """
        text = bytearray(_FIRST)
        first = torch.frombuffer(text, dtype=torch.uint8)
        begun = self._start(rank, first, _WORDS, out=False)

        def finish() -> bytes:
            begun()
            while (length := int.from_bytes(text[:_LENGTH], "little", signed=True)) == _BEAT:
                beats(rank)
                self._start(rank, first, _WORDS, out=False)()
            rest = bytearray(max(0, length - (_FIRST - _LENGTH)))
            if rest:
                self._start(rank, torch.frombuffer(rest, dtype=torch.uint8), _WORDS, out=False)()
            return bytes(text[_LENGTH : _LENGTH + length]) + rest

        return finish

    def beat(self, ranks: Iterable[int], interval: float) -> None:
        """Send a heartbeat to each of some ranks that was sent none for `interval` seconds."""
        now = time.monotonic()
        for rank in ranks:
            if now - self._beaten.get(rank, self._since) < interval:
                continue
            self._beaten[rank] = now
            beat = torch.frombuffer(bytearray(_first(_BEAT, b"")), dtype=torch.uint8)
            with self._blaming(rank):
                self._beats.append((beat, self.group.send([beat], rank, _WORDS)))

    def forget_beats(self) -> None:
        """Count the time until the next heartbeat from now on."""
        self._beats.clear()
        self._beaten.clear()
        self._since = time.monotonic()

    def finish_sending(self, seconds: float) -> None:
        """Wait for what is being sent.

        gloo does not notify a rank that is receiving a message that the sender has closed the
        connection: it would wait until the timeout.
        """
        until = time.monotonic() + seconds
        for work in [work for holder in self._sent for work in holder]:
            with suppress(RuntimeError):
                work.wait(delta(until - time.monotonic()))

    def drop(self) -> None:
        """Close the connections."""
        for holder in (*self._sent, *self._awaited):
            holder.clear()
        self._sent.clear()
        self._awaited.clear()
        self.forget_beats()
        self.group = None

    def _start(self, rank: int, data: torch.Tensor, tag: int, out: bool) -> Callable[[], None]:
        """Start to send or to receive; call the result to wait until it is done.

        A transfer in progress keeps the connections open, and the tracebacks of errors keep
        frames; so no frame holds it, but a list that `drop` empties.
        """
        with self._blaming(rank):
            how = "send" if out else "recv"
            holder = [getattr(self.group, how)([data], rank, tag)]
        if out:
            self.messages += 1
            self.sent_bytes += data.nbytes
        under_way = self._sent if out else self._awaited
        under_way.append(holder)

        def wait() -> None:
            with self._blaming(rank), self._waiting(rank):
                holder[0].wait(delta(self.timeout))
            holder.clear()
            under_way.remove(holder)

        return wait

    @contextmanager
    def _blaming(self, rank: int) -> Iterator[None]:
        """Turn gloo's error into one that names the rank that failed first."""
        if self.group is None:
            raise self._blame(-1, RuntimeError("it had failed before"), 0)
        began = time.monotonic()
        try:
            yield
        except ours(RuntimeError) as error:
            raise self._blame(rank, error, time.monotonic() - began) from error


def framed(message: bytes) -> list[bytes]:
    """Return a message as it is sent: its beginning, and the rest of it, if there is more."""
    parts = [_first(len(message), message), message[_FIRST - _LENGTH :]]
    return [part for part in parts if part]


def _first(length: int, message: bytes) -> bytes:
    """Return what a message begins with."""
    start = length.to_bytes(_LENGTH, "little", signed=True) + message[: _FIRST - _LENGTH]
    return start.ljust(_FIRST, b"\0")


def delta(seconds: float) -> timedelta:
    """Return a time as torch takes it, never none at all."""
    return timedelta(milliseconds=max(1, round(seconds * 1000)))
