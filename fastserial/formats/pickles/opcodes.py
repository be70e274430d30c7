"""What each opcode does: functions in a table by the opcode's byte."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError
from fastserial.formats.pickles.machine import (
    CONTAINER_BYTES,
    PUSH_BYTES,
    Call,
    Global,
    Machine,
    Mapping,
    Persistent,
    Stop,
)

__all__ = ["TABLE"]

_Handler = Callable[[Machine], None]
TABLE: list[_Handler | None] = [None] * 256


def _opcode(codes: bytes) -> Callable[[_Handler], _Handler]:
    def enter(handler: _Handler) -> _Handler:
        for code in codes:
            TABLE[code] = handler
        return handler

    return enter


def _constant(code: bytes, value: Any) -> None:
    @_opcode(code)
    def push(machine: Machine) -> None:
        machine.stack.append(value)


def _number(code: bytes, form: str) -> None:
    unpack, size = struct.Struct(form).unpack, struct.calcsize(form)

    @_opcode(code)
    def push(machine: Machine) -> None:
        machine.stack.append(unpack(machine.stream.read(size))[0])


_constant(b"N", None)
_constant(b"\x88", True)
_constant(b"\x89", False)
_constant(b")", ())
_number(b"J", "<i")
_number(b"K", "<B")
_number(b"M", "<H")
_number(b"G", ">d")


def _little(machine: Machine, size: int) -> int:
    return int.from_bytes(machine.stream.read(size), "little")


def _text_of(machine: Machine, size: int) -> None:
    data = machine.text(_little(machine, size), "str")
    machine.stack.append(data.decode("utf-8", "surrogatepass") if isinstance(data, bytes) else data)


def _bytes_of(machine: Machine, size: int) -> None:
    machine.stack.append(machine.text(_little(machine, size), "bytes"))


def _integer_of(machine: Machine, size: int) -> None:
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
    TABLE[_code[0]] = lambda machine, reader=_reader, size=_size: reader(machine, size)  # type: ignore[misc]


@_opcode(b"\x80")
def _protocol(machine: Machine) -> None:
    version = machine.stream.read(1)[0]
    if version > 5:
        raise CorruptCheckpointError(
            f"pickle protocol {version} is unknown", offset=machine.stream.tell() - 1
        )


@_opcode(b"\x95")
def _frame(machine: Machine) -> None:
    machine.stream.read(8)


@_opcode(b".")
def _stop(machine: Machine) -> None:
    if machine.marks or len(machine.stack) != 1:
        raise CorruptCheckpointError(
            f"the pickle ends with {len(machine.stack)} values", offset=machine.stream.tell() - 1
        )
    raise Stop


@_opcode(b"I")
def _int_line(machine: Machine) -> None:
    text = machine.stream.line()
    machine.stack.append(text == b"01" if text in (b"00", b"01") else int(text))


@_opcode(b"L")
def _long_line(machine: Machine) -> None:
    text = machine.stream.line()
    machine.stack.append(int(text[:-1] if text.endswith(b"L") else text))


@_opcode(b"(")
def _mark(machine: Machine) -> None:
    machine.budget -= CONTAINER_BYTES
    machine.marks.append(machine.stack)
    machine.stack = []


@_opcode(b"0")
def _pop(machine: Machine) -> None:
    if machine.stack:
        del machine.stack[-1]
    else:
        machine.pop_mark()


@_opcode(b"1")
def _pop_to_mark(machine: Machine) -> None:
    machine.pop_mark()


# containers


@_opcode(b"]")
def _empty_list(machine: Machine) -> None:
    machine.budget -= CONTAINER_BYTES
    machine.stack.append([])


@_opcode(b"}")
def _empty_dict(machine: Machine) -> None:
    machine.budget -= CONTAINER_BYTES
    machine.stack.append(Mapping())


@_opcode(b"\x8f")
def _empty_set(machine: Machine) -> None:
    machine.budget -= CONTAINER_BYTES
    machine.stack.append(Call(Global("builtins", "set"), ()))


@_opcode(b"\x91")
def _frozen_set(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.budget -= CONTAINER_BYTES
    machine.stack.append(Call(Global("builtins", "frozenset"), (tuple(items),)))


@_opcode(b"t")
def _tuple(machine: Machine) -> None:
    machine.push_tuple(machine.pop_mark())


def _tuple_of(code: bytes, count: int) -> None:
    @_opcode(code)
    def build(machine: Machine) -> None:
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
def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])


@_opcode(b"e\x90")
def _append_all(machine: Machine) -> None:
    items = machine.pop_mark()
    _extend(machine.stack[-1], items)


@_opcode(b"s")
def _set_item(machine: Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.budget -= PUSH_BYTES
    _set_items(machine.stack[-1], [(key, value)])


@_opcode(b"u")
def _set_all_items(machine: Machine) -> None:
    items = machine.pop_mark()
    _set_items(machine.stack[-1], _pairs(items))


# memo


@_opcode(b"q")
def _put_short(machine: Machine) -> None:
    machine.memo[machine.stream.read(1)[0]] = machine.stack[-1]


@_opcode(b"r")
def _put_long(machine: Machine) -> None:
    machine.memo[_little(machine, 4)] = machine.stack[-1]


@_opcode(b"\x94")
def _memoize(machine: Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


@_opcode(b"h")
def _get_short(machine: Machine) -> None:
    machine.stack.append(machine.memo[machine.stream.read(1)[0]])


@_opcode(b"j")
def _get_long(machine: Machine) -> None:
    machine.stack.append(machine.memo[_little(machine, 4)])


# what would run code


def _new_global(machine: Machine, module: str, name: str) -> Global:
    found = Global(module, name)
    machine.globals.add(found)
    return found


def _call(machine: Machine, function: Any, arguments: Any, keywords: Any = None) -> None:
    machine.budget -= CONTAINER_BYTES
    machine.stack.append(Call(function, arguments, keywords))


@_opcode(b"c")
def _global_lines(machine: Machine) -> None:
    module = machine.stream.line().decode("utf-8")
    name = machine.stream.line().decode("utf-8")
    machine.budget -= len(module) + len(name)
    machine.stack.append(_new_global(machine, module, name))


@_opcode(b"\x93")
def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a name to import is no string")
    machine.stack.append(_new_global(machine, module, name))


@_opcode(b"R\x81")
def _call_without_keywords(machine: Machine) -> None:
    arguments = machine.stack.pop()
    _call(machine, machine.stack.pop(), arguments)


@_opcode(b"\x92")
def _new_object_with_keywords(machine: Machine) -> None:
    keywords = machine.stack.pop()
    arguments = machine.stack.pop()
    _call(machine, machine.stack.pop(), arguments, keywords)


@_opcode(b"b")
def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is Call:
        machine.budget -= PUSH_BYTES
        target.state.append(state)
    elif type(target) is not Persistent:
        raise TypeError(f"a {type(target).__name__} takes no state")


def _ask(machine: Machine, pid: Any) -> None:
    found = Persistent(pid)
    machine.persistents.append(found)
    machine.stack.append(found)


@_opcode(b"Q")
def _persistent(machine: Machine) -> None:
    _ask(machine, machine.stack.pop())


@_opcode(b"FSV2ldpgioP\x82\x83\x84\x97\x98")
def _refuse(machine: Machine) -> None:
    raise UnreadableCheckpointError(
        "the pickle has opcodes that fastserial does not read (protocol 0, copyreg extensions, "
        "buffers outside of it): use torch.load"
    )
