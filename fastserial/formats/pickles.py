"""Reading a pickle without executing it.

`decode` runs the pickle's opcodes on symbols: nothing is imported and nothing is called. An import
becomes a `Global`, a call a `Call`, a persistent id a `Persistent`. Memory, time and the length of
values have hard limits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
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

__all__ = [
    "Call",
    "Decoded",
    "Elided",
    "Global",
    "Limits",
    "Mapping",
    "Persistent",
    "decode",
    "refuse_nested",
]

_TUPLES = (b"t", b"\x85", b"\x86", b"\x87")  # the opcodes that make one
_CHECK_EVERY = 4096  # opcodes between looks at the clock
_PUSH_BYTES = 96  # what one opcode's value costs, roughly
_CONTAINER_BYTES = 200
_MOST_NESTED_TUPLES = 50_000  # to hash some 130,000 takes a thread's whole stack of 8 MiB


class Global(NamedTuple):
    """A name that unpickling would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent(NamedTuple):
    """A persistent id, the argument of `persistent_load`."""

    pid: Any


class Elided(NamedTuple):
    """A value too long to keep: its type and its length (bytes)."""

    kind: str
    nbytes: int


@dataclass(slots=True, eq=False)
class Mapping:
    """A dictionary, whose keys need not be hashable."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


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


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on reading a pickle.

    Attributes:
        memory: bytes of its values (an upper estimate).
        seconds: time.
        kept: strings and numbers longer than this many bytes are left out (`Elided`).
        depth: how deep values may be nested, for a walk over them.
        tuples: how deep tuples may be nested: hashing one takes stack for each.
        visits: how many values a walk may visit, roughly.
    """

    memory: int = 1024 * 1024 * 1024
    seconds: float = 60.0
    kept: int = 64 * 1024
    depth: int = 1000
    tuples: int = _MOST_NESTED_TUPLES
    visits: int = 20_000_000


class _Stop(Exception):
    """The pickle is at its end."""


class _Machine:
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

    def run(self, table: Sequence[Callable[[_Machine], None] | None]) -> Any:
        """Run opcodes up to the end and return the pickle's value.

        Raises:
            CorruptCheckpointError, IndexError, ValueError, KeyError, TypeError: it is damaged.
            PickleLimitError: it takes more than the limits allow.
        """
        deadline = monotonic() + self.limits.seconds
        stream = self.stream
        try:
            while True:
                for _ in range(_CHECK_EVERY):
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
                    self.budget -= _PUSH_BYTES
                    handler(self)
                if self.budget < 0:
                    raise PickleLimitError(f"a pickle takes more than {self.limits.memory} bytes")
                if monotonic() > deadline:
                    raise PickleLimitError(f"a pickle takes longer than {self.limits.seconds} s")
        except _Stop:
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
            self.budget -= _CONTAINER_BYTES
            self._nested[id(made)] = made, depth
        self.stack.append(made)

    def text(self, length: int, kind: str) -> bytes | Elided:
        """Return the next `length` bytes; too many are left out."""
        if length > self.limits.kept:
            self.stream.skip(length)
            return Elided(kind, length)
        self.budget -= length
        return self.stream.read(length)


# -- what each opcode does: functions in a table by the opcode's byte ------------------------------


_Handler = Callable[[_Machine], None]
_TABLE: list[_Handler | None] = [None] * 256


def _opcode(codes: bytes) -> Callable[[_Handler], _Handler]:
    def enter(handler: _Handler) -> _Handler:
        for code in codes:
            _TABLE[code] = handler
        return handler

    return enter


def _constant(code: bytes, value: Any) -> None:
    @_opcode(code)
    def push(machine: _Machine) -> None:
        machine.stack.append(value)


def _number(code: bytes, form: str) -> None:
    unpack, size = struct.Struct(form).unpack, struct.calcsize(form)

    @_opcode(code)
    def push(machine: _Machine) -> None:
        machine.stack.append(unpack(machine.stream.read(size))[0])


_constant(b"N", None)
_constant(b"\x88", True)
_constant(b"\x89", False)
_constant(b")", ())
_number(b"J", "<i")
_number(b"K", "<B")
_number(b"M", "<H")
_number(b"G", ">d")


def _little(machine: _Machine, size: int) -> int:
    return int.from_bytes(machine.stream.read(size), "little")


def _text_of(machine: _Machine, size: int) -> None:
    data = machine.text(_little(machine, size), "str")
    machine.stack.append(data.decode("utf-8", "surrogatepass") if isinstance(data, bytes) else data)


def _bytes_of(machine: _Machine, size: int) -> None:
    machine.stack.append(machine.text(_little(machine, size), "bytes"))


def _integer_of(machine: _Machine, size: int) -> None:
    data = machine.text(_little(machine, size), "int")
    machine.stack.append(
        int.from_bytes(data, "little", signed=True) if isinstance(data, bytes) else data
    )


for _code, _reader, _size in (
    (b"\x8c", _text_of, 1),
    (b"X", _text_of, 4),
    (b"\x8d", _text_of, 8),
    (b"U", _bytes_of, 1),
    (b"T", _bytes_of, 4),
    (b"C", _bytes_of, 1),
    (b"B", _bytes_of, 4),
    (b"\x8e", _bytes_of, 8),
    (b"\x96", _bytes_of, 8),
    (b"\x8a", _integer_of, 1),
    (b"\x8b", _integer_of, 4),
):
    _TABLE[_code[0]] = lambda machine, reader=_reader, size=_size: reader(machine, size)  # type: ignore[misc]


@_opcode(b"\x80")
def _protocol(machine: _Machine) -> None:
    version = machine.stream.read(1)[0]
    if version > 5:
        raise CorruptCheckpointError(
            f"pickle protocol {version} is unknown", offset=machine.stream.tell() - 1
        )


@_opcode(b"\x95")
def _frame(machine: _Machine) -> None:
    machine.stream.read(8)


@_opcode(b".")
def _stop(machine: _Machine) -> None:
    if machine.marks or len(machine.stack) != 1:
        raise CorruptCheckpointError(
            f"the pickle ends with {len(machine.stack)} values", offset=machine.stream.tell() - 1
        )
    raise _Stop


@_opcode(b"I")
def _int_line(machine: _Machine) -> None:
    text = machine.stream.line()
    machine.stack.append(text == b"01" if text in (b"00", b"01") else int(text))


@_opcode(b"L")
def _long_line(machine: _Machine) -> None:
    text = machine.stream.line()
    machine.stack.append(int(text[:-1] if text.endswith(b"L") else text))


@_opcode(b"(")
def _mark(machine: _Machine) -> None:
    machine.budget -= _CONTAINER_BYTES
    machine.marks.append(machine.stack)
    machine.stack = []


@_opcode(b"0")
def _pop(machine: _Machine) -> None:
    if machine.stack:
        del machine.stack[-1]
    else:
        machine.pop_mark()


@_opcode(b"1")
def _pop_to_mark(machine: _Machine) -> None:
    machine.pop_mark()


# containers


def _container(code: bytes, make: Callable[[], Any]) -> None:
    @_opcode(code)
    def push(machine: _Machine) -> None:
        machine.budget -= _CONTAINER_BYTES
        machine.stack.append(make())


_container(b"]", list)
_container(b"}", Mapping)
_container(b"\x8f", lambda: Call(Global("builtins", "set"), ()))


@_opcode(b"\x91")
def _frozen_set(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.budget -= _CONTAINER_BYTES
    machine.stack.append(Call(Global("builtins", "frozenset"), (tuple(items),)))


@_opcode(b"t")
def _tuple(machine: _Machine) -> None:
    machine.push_tuple(machine.pop_mark())


def _tuple_of(code: bytes, count: int) -> None:
    @_opcode(code)
    def build(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise CorruptCheckpointError("too few values", offset=machine.stream.tell())
        items = stack[-count:]
        del stack[-count:]
        machine.push_tuple(items)


_tuple_of(b"\x85", 1)
_tuple_of(b"\x86", 2)
_tuple_of(b"\x87", 3)


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError("a key has no value")
    return list(zip(items[::2], items[1::2], strict=True))


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is list:
        target.extend(items)
    elif type(target) is Call:
        target.appended.extend(items)
    else:
        raise TypeError(f"nothing can be appended to a {type(target).__name__}")


def _set_items(target: Any, pairs: list[tuple[Any, Any]]) -> None:
    if type(target) is Mapping or type(target) is Call:
        target.items.extend(pairs)
    else:
        raise TypeError(f"a {type(target).__name__} has no items")


@_opcode(b"a")
def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])


@_opcode(b"e\x90")
def _append_all(machine: _Machine) -> None:
    items = machine.pop_mark()
    _extend(machine.stack[-1], items)


@_opcode(b"s")
def _set_item(machine: _Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.budget -= _PUSH_BYTES
    _set_items(machine.stack[-1], [(key, value)])


@_opcode(b"u")
def _set_all_items(machine: _Machine) -> None:
    items = machine.pop_mark()
    _set_items(machine.stack[-1], _pairs(items))


# memo


def _memo(put: bytes, get: bytes, size: int) -> None:
    """Define the opcodes that address the memo with `size` bytes."""

    @_opcode(put)
    def store(machine: _Machine) -> None:
        machine.memo[_little(machine, size)] = machine.stack[-1]

    @_opcode(get)
    def recall(machine: _Machine) -> None:
        machine.stack.append(machine.memo[_little(machine, size)])


_memo(b"q", b"h", 1)
_memo(b"r", b"j", 4)


@_opcode(b"\x94")
def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


# what would run code


def _new_global(machine: _Machine, module: str, name: str) -> Global:
    found = Global(module, name)
    machine.globals.add(found)
    return found


def _call(machine: _Machine, function: Any, arguments: Any, keywords: Any = None) -> None:
    machine.budget -= _CONTAINER_BYTES
    machine.stack.append(Call(function, arguments, keywords))


@_opcode(b"c")
def _global_lines(machine: _Machine) -> None:
    module = machine.stream.line().decode("utf-8")
    name = machine.stream.line().decode("utf-8")
    machine.budget -= len(module) + len(name)
    machine.stack.append(_new_global(machine, module, name))


@_opcode(b"\x93")
def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a name to import is no string")
    machine.stack.append(_new_global(machine, module, name))


@_opcode(b"R\x81")
def _call_without_keywords(machine: _Machine) -> None:
    arguments = machine.stack.pop()
    _call(machine, machine.stack.pop(), arguments)


@_opcode(b"\x92")
def _new_object_with_keywords(machine: _Machine) -> None:
    keywords = machine.stack.pop()
    arguments = machine.stack.pop()
    _call(machine, machine.stack.pop(), arguments, keywords)


@_opcode(b"b")
def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is Call:
        machine.budget -= _PUSH_BYTES
        target.state.append(state)
    elif type(target) is not Persistent:
        raise TypeError(f"a {type(target).__name__} takes no state")


def _ask(machine: _Machine, pid: Any) -> None:
    found = Persistent(pid)
    machine.persistents.append(found)
    machine.stack.append(found)


@_opcode(b"Q")
def _persistent(machine: _Machine) -> None:
    _ask(machine, machine.stack.pop())


@_opcode(b"FSV2ldpgioP\x82\x83\x84\x97\x98")
def _refuse(machine: _Machine) -> None:
    raise UnreadableCheckpointError(
        "the pickle has opcodes that fastserial does not read (protocol 0, copyreg extensions, "
        "buffers outside of it): use torch.load"
    )


# -- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoded:
    """A pickle that was read.

    Attributes:
        value: what it holds.
        globals: the names it would import.
        persistents: the persistent ids, in order.
        end: where it ends in the stream (bytes).
    """

    value: Any
    globals: frozenset[Global]
    persistents: list[Persistent]
    end: int


def decode(stream: ByteStream, limits: Limits | None = None) -> Decoded:
    """Read one pickle, of protocol 1 to 5, from the position of the stream on.

    Raises:
        CorruptCheckpointError: it is no whole pickle.
        UnreadableCheckpointError: it has opcodes that are not read, such as those of protocol 0.
        PickleLimitError: reading it takes more than the limits allow.
        OSError: the stream cannot be read.
    """
    machine = _Machine(stream, limits or Limits())
    try:
        value = machine.run(_TABLE)
    except (CheckpointFileError, PickleLimitError, OSError):
        raise
    except (IndexError, ValueError, KeyError, TypeError, OverflowError, Warning) as error:
        raise CorruptCheckpointError(
            f"damaged pickle ({type(error).__name__}: {error})", offset=stream.tell()
        ) from error
    return Decoded(value, frozenset(machine.globals), machine.persistents, stream.tell())


def refuse_nested(data: bytes) -> None:
    """Refuse a pickle whose tuples are nested so deep that hashing one would end the process.

    Call it before an untrusted pickle is unpickled, which hashes what it uses as keys.

    Raises:
        CheckpointFileError, PickleLimitError: it does, or `decode` cannot read it.
    """
    if sum(map(data.count, _TUPLES)) > _MOST_NESTED_TUPLES:  # an upper bound, quickly found
        stream = ByteStream(BytesSource(data))
        decode(stream, Limits(memory=max(1 << 30, 512 * len(data)), seconds=600.0, kept=len(data)))
