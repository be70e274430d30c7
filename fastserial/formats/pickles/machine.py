"""The unpickler's stack, marks and memo, holding symbols for values, and the limits on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from fastserial.errors import CorruptCheckpointError, PickleLimitError
from fastserial.formats.source import ByteStream

__all__ = [
    "CONTAINER_BYTES",
    "MOST_NESTED_TUPLES",
    "PUSH_BYTES",
    "Call",
    "Elided",
    "Global",
    "Limits",
    "Machine",
    "Mapping",
    "Persistent",
    "Stop",
]

CHECK_EVERY = 4096  # opcodes between looks at the clock
PUSH_BYTES = 96  # what one opcode's value costs, roughly
CONTAINER_BYTES = 200
MOST_NESTED_TUPLES = 50_000  # to hash some 130,000 takes a thread's whole stack of 8 MiB


class Global(NamedTuple):
    """A name that unpickling would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent(NamedTuple):
    """What `persistent_load` would be asked for."""

    pid: Any


class Elided(NamedTuple):
    """A value too long to keep: its type and its length (bytes)."""

    kind: str
    nbytes: int


@dataclass(slots=True, eq=False)
class Mapping:
    """A dictionary: keys need not be hashable here."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Call:
    """What unpickling would call, with what it would then put into the result.

    Attributes:
        function: usually a `Global`.
        arguments: positional arguments (a tuple), or whatever the pickle holds instead.
        keywords: keyword arguments, None if there are none.
        state: what `__setstate__` would get, in order.
        appended: items that would be appended.
        items: key and value pairs that would be set.
    """

    function: Any
    arguments: Any
    keywords: Any = None
    state: list[Any] = field(default_factory=list)
    appended: list[Any] = field(default_factory=list)
    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """What reading a pickle may take.

    Attributes:
        memory: bytes of what is kept of it (an estimate from above).
        seconds: time.
        kept: strings and numbers longer than this many bytes are left out (`Elided`).
        depth: how deep values may be nested in each other, for those who walk them.
        tuples: how deep tuples may be nested in each other: hashing one takes stack for each.
        visits: how many values they may look at, roughly.
    """

    memory: int = 1024 * 1024 * 1024
    seconds: float = 60.0
    kept: int = 64 * 1024
    depth: int = 1000
    tuples: int = MOST_NESTED_TUPLES
    visits: int = 20_000_000


class Stop(Exception):
    """The pickle is at its end."""


class Machine:
    """The unpickler's stack, marks and memo, holding symbols."""

    def __init__(self, stream: ByteStream, limits: Limits) -> None:
        self.stream = stream
        self.limits = limits
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._nested: dict[int, tuple[tuple[Any, ...], int]] = {}  # tuples with tuples in them
        self.globals: set[Global] = set()
        self.persistents: list[Persistent] = []
        self.budget = limits.memory

    def run(self, table: Sequence[Callable[[Machine], None] | None]) -> Any:
        """Run opcodes up to the end and return the pickle's value.

        Raises:
            CorruptCheckpointError, IndexError, ValueError, KeyError, TypeError: it is damaged.
            PickleLimitError: it takes more than the limits allow.
        """
        deadline = monotonic() + self.limits.seconds
        stream = self.stream
        try:
            while True:
                for _ in range(CHECK_EVERY):
                    at = stream.at  # not `read`: a call for each opcode is a fifth of the time
                    if at >= len(stream.chunk):
                        stream.load_chunk(1)
                        at = 0
                    code = stream.chunk[at]
                    stream.at = at + 1
                    handler = table[code]
                    if handler is None:
                        raise CorruptCheckpointError(
                            f"byte {code:#04x} is no pickle opcode", offset=stream.tell() - 1
                        )
                    self.budget -= PUSH_BYTES
                    handler(self)
                if self.budget < 0:
                    raise PickleLimitError(f"a pickle takes more than {self.limits.memory} bytes")
                if monotonic() > deadline:
                    raise PickleLimitError(f"a pickle takes longer than {self.limits.seconds} s")
        except Stop:
            return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        """Return what was pushed since the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def push_tuple(self, items: list[Any]) -> None:
        """Push a tuple.

        Raises:
            PickleLimitError: it is nested too deep.
        """
        made = tuple(items)
        depths = [self._nested.get(id(part), (part, 1))[1] for part in made if type(part) is tuple]
        if depths:
            depth = 1 + max(depths)
            if depth > self.limits.tuples:
                raise PickleLimitError(
                    f"tuples are nested more than {self.limits.tuples} deep in a pickle"
                )
            self.budget -= CONTAINER_BYTES
            self._nested[id(made)] = made, depth
        self.stack.append(made)

    def text(self, length: int, kind: str) -> bytes | Elided:
        """Return the next `length` bytes, or leave them out if they are too many."""
        if length > self.limits.kept:
            self.stream.skip(length)
            return Elided(kind, length)
        self.budget -= length
        return self.stream.read(length)
