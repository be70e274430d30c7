"""Reading a pickle without executing it.

`decode` runs Python's own unpickler on symbols: nothing is imported or called. An import
becomes a `Global`, a call a `Call`, a persistent id a `Persistent`. What is built is charged to a
`Budget` first.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from fastserial.errors import (
    CheckpointFileError,
    CorruptCheckpointError,
    PickleLimitError,
    UnreadableCheckpointError,
)
from fastserial.formats.source import BytesSource, ByteStream
from fastserial.interrupts import ours

_TUPLES = (b"t", b"\x85", b"\x86", b"\x87")  # the opcodes that make one
_CHECK_EVERY = 4096  # opcodes between looks at the budget and the clock
_SLOWEST = 100_000  # bytes of a pickle that are read in a second, on a slow and busy machine
_MOST_NESTED_TUPLES = 50_000  # to hash some 130,000 takes a thread's whole stack of 8 MiB
_DAMAGE = (  # what Python's code raises for a damaged pickle
    AttributeError, LookupError, OverflowError, TypeError, ValueError, Warning,
    pickle.UnpicklingError, struct.error,
)  # fmt: skip


class Global(NamedTuple):
    """A name that unpickling would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent(NamedTuple):
    """A persistent id, the argument of `persistent_load`."""

    pid: Any


@dataclass(frozen=True, slots=True, eq=False)
class Elided:
    """A string, bytes or an integer, too long to keep.

    Attributes:
        nbytes: its length.
        end: where it ends in the stream (bytes).
    """

    nbytes: int
    end: int

    def __str__(self) -> str:
        return f"<{self.nbytes} bytes up to byte {self.end}>"


@dataclass(slots=True, eq=False)
class Mapping:
    """A dictionary, whose keys need not be hashable."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


@dataclass(slots=True, eq=False)
class Call:
    """A call that unpickling would make, and the state and items that the result would get.

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

    def append(self, item: Any) -> None:
        """Note an item that would be appended."""
        self.appended.append(item)

    def extend(self, items: list[Any]) -> None:
        """Note items that would be appended, or added to a set."""
        self.appended.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


_LEAST_MEMORY = 128 * 1024 * 1024
# Bytes of memory for a byte of the pickle. What `torch.save` writes of tensors or numbers takes
# some 15 of them, and up to 60 by the estimate that is charged.
_MEMORY_RATIO = 96


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on reading what a file says of its contents; `of` has those for its size.

    Attributes:
        memory: bytes of all that is built for it (an upper estimate).
        seconds: time to decode pickles.
        kept: longer strings, bytes and integers are skipped (`Elided`), in bytes.
        depth: how deep a tensor may be nested to be found.
    """

    memory: int = _LEAST_MEMORY
    seconds: float = 60.0
    kept: int = 64 * 1024
    depth: int = 1000

    @classmethod
    def of(cls, nbytes: int) -> Limits:
        """Return the limits for a pickle of `nbytes` bytes."""
        memory = max(_LEAST_MEMORY, _MEMORY_RATIO * nbytes)
        return cls(memory, max(60.0, nbytes / _SLOWEST))


class Budget:
    """What is left of the limits. It is charged before anything is built.

    Attributes:
        limits: what it began with.
        left: bytes of memory.
    """

    __slots__ = ("_deadline", "left", "limits")

    def __init__(self, limits: Limits | None = None) -> None:
        """Begin now; by default with the limits for a small file."""
        self.limits = limits or Limits()
        self.left = self.limits.memory
        self._deadline = monotonic() + self.limits.seconds

    def spend(self, nbytes: int) -> None:
        """Take memory.

        Raises:
            PickleLimitError: there is not as much left.
        """
        self.left -= nbytes
        if self.left < 0:
            raise PickleLimitError(
                f"reading its pickle takes more than {self.limits.memory} bytes: use torch.load"
            )

    def narrow(self, nbytes: int) -> None:
        """Leave no more than a pickle of `nbytes` bytes may take."""
        self.left = min(self.left, Limits.of(nbytes).memory)

    def check_time(self) -> None:
        """Look at the clock.

        Raises:
            PickleLimitError: the time is over.
        """
        if monotonic() > self._deadline:
            raise PickleLimitError(
                f"its pickle takes longer than {self.limits.seconds} s: use torch.load"
            )


class _Stop(Exception):
    """The pickle is at its end."""


class _SymbolicUnpickler(pickle._Unpickler):
    """Python's own unpickler, in which names, calls and state are symbols.

    Nothing on its stack can be called: `find_class` returns a `Global`. Only the opcodes named
    below are known, so an opcode that a later Python adds is refused.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: ByteStream, budget: Budget) -> None:
        super().__init__(stream, encoding="bytes")
        self.stream = stream
        self.budget = budget
        self._kept = budget.limits.kept
        self.globals: set[Global] = set()
        self.persistents: list[Persistent] = []
        self.skipped = 0
        self._elided: Elided | None = None
        self._depths: dict[int, tuple[tuple[Any, ...], int]] = {}  # of tuples with tuples in them

    def load(self) -> Any:
        """Run opcodes up to the end and return the pickle's value.

        Raises:
            CorruptCheckpointError: it is damaged; also the errors in `_DAMAGE`.
            UnreadableCheckpointError: it has opcodes that are not read.
            PickleLimitError: it takes more than the limits allow.
        """
        self.stack, self.metastack = [], []
        self.append = self.stack.append
        stream, budget = self.stream, self.budget
        try:
            while True:
                for _ in range(_CHECK_EVERY):
                    at = stream.at  # not `read`: a call for each opcode is a fifth of the time
                    if at >= len(stream.chunk):
                        stream.load_chunk(1)
                        at = 0
                    code = stream.chunk[at]
                    stream.at = at + 1
                    budget.left -= _COSTS[code]
                    _TABLE[code](self)
                budget.spend(0)
                budget.check_time()
        except ours(_Stop):
            return self.stack[-1]

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes; nothing if they are more than are kept of a value.

        Then `replace_elided` has to follow the opcode.

        Raises:
            CorruptCheckpointError: there are not as many.
            PickleLimitError: all values together take more than the limits allow.
        """
        if nbytes > self._kept:
            self.stream.skip(nbytes)
            self.skipped += nbytes
            self._elided = Elided(nbytes, self.stream.tell())
            return b""
        self.budget.spend(_WIDEST * nbytes)
        return self.stream.read(nbytes)

    def replace_elided(self) -> None:
        """Replace the value of the last opcode if its bytes were skipped."""
        if self._elided is not None:
            self.stack[-1] = self._elided
            self._elided = None

    def readline(self) -> bytes:
        """Return the bytes up to the next newline, which is included."""
        line = self.stream.readline()
        self.budget.spend(_WIDEST * len(line))
        return line

    def find_class(self, module: str, name: str) -> Global:
        found = Global(module, name)
        self.globals.add(found)
        return found

    def persistent_load(self, pid: Any) -> Persistent:
        found = Persistent(pid)
        self.persistents.append(found)
        return found

    # -- opcodes that differ from Python's -----------------------------------------------------

    def load_frame(self) -> None:
        self.read(8)

    def load_stop(self) -> None:
        if self.metastack or len(self.stack) != 1:
            raise ValueError(f"it ends with {len(self.stack)} values")
        raise _Stop

    def load_empty_dictionary(self) -> None:
        self.append(Mapping())

    def load_empty_set(self) -> None:
        self.append(Call(Global("builtins", "set"), ()))

    def load_frozenset(self) -> None:
        items = self.pop_mark()  # before `append`, which changes with it
        self.append(Call(Global("builtins", "frozenset"), (tuple(items),)))

    def load_tuple(self) -> None:
        self._append_tuple(self.pop_mark())

    def load_tuple1(self) -> None:
        self._append_tuple([self.stack.pop()])

    def load_tuple2(self) -> None:
        self._append_tuple([self.stack.pop(), self.stack.pop()][::-1])

    def load_tuple3(self) -> None:
        self._append_tuple([self.stack.pop(), self.stack.pop(), self.stack.pop()][::-1])

    def _append_tuple(self, items: list[Any]) -> None:
        made = tuple(items)
        depths = [self._depths.get(id(part), (part, 1))[1] for part in made if type(part) is tuple]
        if depths:
            self.budget.spend(_DEPTH_BYTES)
            depth = 1 + max(depths)
            if depth > _MOST_NESTED_TUPLES:
                raise PickleLimitError(
                    f"tuples are nested more than {_MOST_NESTED_TUPLES} deep in a pickle"
                )
            self._depths[id(made)] = made, depth
        self.append(made)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.append(Call(self.stack.pop(), arguments))

    load_newobj = load_reduce

    def load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        self.append(Call(self.stack.pop(), arguments, keywords))

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Call:
            target.state.append(state)
        elif type(target) is not Persistent:
            raise TypeError(f"a {type(target).__name__} takes no state")

    def load_other(self) -> None:
        raise UnreadableCheckpointError(
            "the pickle has opcodes that fastserial does not read (protocol 0, copyreg extensions, "
            "buffers outside of it): use torch.load"
        )

    def load_nothing(self) -> None:
        offset = self.stream.tell() - 1
        raise CorruptCheckpointError("a byte is no pickle opcode", offset=offset)


_Handler = Callable[[_SymbolicUnpickler], None]
_KNOWN = (
    b"\x80\x95."  # protocol, frame, end
    b"N\x88\x89JKMGIL\x8a\x8b\x8cX\x8dUTCB\x8e\x96"  # constants, numbers, text, bytes
    b"(01)t\x85\x86\x87]ae}su\x8f\x90\x91"  # marks and containers
    b"qhrj\x94"  # memo
    b"c\x93R\x81\x92bQ"  # names, calls, state, persistent ids
)
_LONG = b"X\x8dTB\x8e\x96\x8b"  # text, bytes and integers of any length
_SAME = {pickle.BYTEARRAY8: pickle.BINBYTES8, pickle.ADDITEMS: pickle.APPENDS}
# What each opcode adds to the memory at most (bytes), for objects of 64-bit Python: a number with
# its place in a list and in a pair of a dictionary, if nothing else is said.
_COSTS = [48] * 256
for _codes, _cost in (
    (b"(", 120),  # a list, for what follows it
    (b"]", 112),
    (b"}", 136),
    (b"t\x85\x86\x87", 72),
    (b"qr\x94", 136),  # an entry of the memo
    (b"R\x81\x92", 264),
    (b"\x8f\x91", 448),
    (b"c", 304),
    (b"\x93", 144),
    (b"Q", 88),
):
    for _code in _codes:
        _COSTS[_code] = _cost
_DEPTH_BYTES = 256  # what is noted of a tuple in which there are tuples
_WIDEST = 4  # bytes in memory of a byte of text, if one of its characters needs as many


def _table() -> list[_Handler]:
    """Return what handles each opcode, by its byte: the method of the name that Python's has."""
    table: list[_Handler] = [_SymbolicUnpickler.load_nothing] * 256
    pythons: dict[int, Any] = pickle._Unpickler.dispatch
    for code in pythons:
        table[code] = _SymbolicUnpickler.load_other
    for code in _KNOWN:
        handled = _SAME.get(bytes((code,)), (code,))[0]
        table[code] = getattr(_SymbolicUnpickler, pythons[handled].__name__)
    for code in _LONG:
        table[code] = _eliding(table[code])
    return table


def _eliding(handler: _Handler) -> _Handler:
    def handle(machine: _SymbolicUnpickler) -> None:
        handler(machine)
        machine.replace_elided()

    return handle


_TABLE = _table()


# -- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoded:
    """A pickle that was read.

    Attributes:
        value: what it holds.
        globals: the names it would import.
        persistents: the persistent ids, in order.
        end: where it ends in the stream (bytes).
        nbytes: its length, without the values that are not kept.
    """

    value: Any
    globals: frozenset[Global]
    persistents: list[Persistent]
    end: int
    nbytes: int


def decode(stream: ByteStream, budget: Budget | None = None) -> Decoded:
    """Read one pickle, of protocol 1 to 5, from the position of the stream on.

    Args:
        budget: what it takes is charged to; by default that for a small file.

    Raises:
        CorruptCheckpointError: it is no whole pickle.
        UnreadableCheckpointError: it has opcodes that are not read, such as those of protocol 0.
        PickleLimitError: reading it takes more than the limits allow.
        OSError: the stream cannot be read.
    """
    machine, start = _SymbolicUnpickler(stream, budget or Budget()), stream.tell()
    try:
        value = machine.load()
    except (CheckpointFileError, PickleLimitError, OSError):
        raise
    except ours(*_DAMAGE) as error:
        raise CorruptCheckpointError(
            f"damaged pickle ({type(error).__name__}: {error})", offset=stream.tell()
        ) from error
    end = stream.tell()
    nbytes = end - start - machine.skipped
    return Decoded(value, frozenset(machine.globals), machine.persistents, end, nbytes)


def refuse_costly(data: bytes, limits: Limits) -> None:
    """Refuse a pickle that takes more memory than the limits allow, or would end the process.

    Call it before an untrusted pickle is unpickled: hashing a key that is a tuple nested deep takes
    the whole stack of a thread.

    Args:
        data: the pickle; perhaps with more behind it.

    Raises:
        CheckpointFileError, PickleLimitError: it does, or `decode` cannot read it.
    """
    few_tuples = sum(map(data.count, _TUPLES)) <= _MOST_NESTED_TUPLES  # an upper bound
    if not few_tuples or len(data) * (max(_COSTS) + _DEPTH_BYTES) > limits.memory:
        decode(ByteStream(BytesSource(data)), Budget(limits))
