"""torch's weights-only unpickler, for what is nearly always in a checkpoint, in C.

Torch interprets each opcode in Python, some 35 a tensor. Before anything is decoded here, all
opcodes and all names of a pickle are checked. Python's own unpickler gets only what builds
containers, and imports nothing but storage types, dtypes, `OrderedDict`, `torch.Size` and what
rebuilds tensors:

- Called are these last four, with arguments of bounded length, and nothing else: no other object
  in such a pickle can be called.
- What changes an object (items that are set or appended, state) is not left to Python's
  unpickler, which accepts any object with such a method: each such opcode is replaced by a
  persistent id, and `_CHANGES` compares the object's type, as torch does.
- No stand-in for a function is in a value that is returned.

Everything else, and any error, is left to torch's own unpickler, from the first byte on. The check
takes a few steps for each tensor, not one for each opcode: a regular expression skips everything
between two strings.
"""

from __future__ import annotations

import io
import pickle
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import _weights_only_unpickler as torchs

from fastserial.config import current
from fastserial.interrupts import ours

# Opcodes of fixed length: containers, marks, None, True, False, REDUCE, BINPERSID; short
# puts and gets, ints, floats. Runs are short, since the expression keeps a record of each step.
_FIXED = rb"[(t\x85-\x87)\]}N\x88\x89RQ]|[qhK].|M..|J.{4}|j.{4}|G.{8}"
_RUN = 256

_PROTOCOL_2 = b"\x80\x02"
_STRING, _LONG, _GLOBAL, _STOP = b"X"[0], b"\x8a"[0], b"c"[0], b"."[0]
# For each opcode that changes an object, what asks `persistent_load` to do it: with the object, the
# items or the state, and the opcode as bytes, which no plain pickle can make.
_ASKS = {
    b"u"[0]: b"tC\x01u\x87Q",
    b"e"[0]: b"tC\x01e\x87Q",
    b"s"[0]: b"\x86C\x01s\x87Q",
    b"a"[0]: b"C\x01a\x87Q",
    b"b"[0]: b"C\x01b\x87Q",
}


class PlainPickle(NamedTuple):
    """A plain pickle.

    Attributes:
        names: what it imports, as `module.name`.
        changes: where the opcodes are that set items, append items or give state (bytes).
        end: where it ends (bytes).
    """

    names: frozenset[str]
    changes: list[int]
    end: int


def plain_pickle(data: bytes) -> PlainPickle | None:
    """Return what a plain pickle imports, and where it changes objects; None if it is not plain.

    Args:
        data: a pickle of protocol 2, and perhaps more after it. It may be hostile: running it
            takes time and memory in proportion to its length, except for the functions it calls.
    """
    if data[:2] != _PROTOCOL_2:
        return None
    names: set[str] = set()
    changes: list[int] = []
    run = _run(len(data) >> 17)
    at, end = 2, len(data)
    while True:
        match = run.match(data, at)
        at = match.end() if match else at
        if at >= end:
            return None
        opcode = data[at]
        if opcode == _STRING:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif opcode == _GLOBAL:
            module, _, rest = data[at + 1 : at + 257].partition(b"\n")
            name, newline, _ = rest.partition(b"\n")
            if not newline or not (module + name).isascii():
                return None
            names.add(f"{module.decode()}.{name.decode()}")
            at += len(module) + len(name) + 3
        elif opcode == _LONG:
            at += 2 + data[at + 1] if at + 1 < end else 2
        elif opcode == _STOP:
            return PlainPickle(frozenset(names), changes, at + 1)
        elif opcode in _ASKS:
            changes.append(at)
            at += 1
        elif not match or match.end() == match.start():
            return None


@cache
def _run(highest: int) -> re.Pattern[bytes]:
    """Match opcodes of fixed length; a long put has an index below (highest + 1) << 16.

    The unpickler makes room for the highest index, and a pickle puts at most every second byte.
    """
    index = rb"r..[\x00-%b]\x00" % re.escape(bytes((min(highest, 255),)))
    return re.compile(rb"(?:%b|%b){0,%d}" % (_FIXED, index, _RUN), re.DOTALL)


_rebuild: Any = torch._utils
_CONSTANTS = (torch.serialization.StorageType, torch.dtype)
_LISTS = (tuple, list, torch.Size)
_MOST_DIMENSIONS = 1024


class _Refused(pickle.UnpicklingError):
    """Torch's unpickler must load it, or say what is wrong."""


class _GuardedFunction:
    """A function for one pickle, which is called only with arguments of bounded cost."""

    __slots__ = ("__weakref__", "_fits", "_function")

    def __init__(self, function: Callable[..., Any], fits: Callable[..., bool]) -> None:
        self._function = function
        self._fits = fits

    def __call__(self, *args: Any) -> Any:
        if not self._fits(*args):
            raise _Refused("arguments")
        return self._function(*args)


def _no_longer(*sizes: Any) -> bool:
    return all(type(size) in _LISTS and len(size) <= _MOST_DIMENSIONS for size in sizes)


# A list that a call copies can be an argument of any number of calls.
_CALLS: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[..., bool]]] = {
    "collections.OrderedDict": (lambda: OrderedDict, lambda *args: not args),
    "torch.Size": (lambda: torch.Size, lambda *args: len(args) == 1 and _no_longer(*args)),
    "torch._utils._rebuild_tensor_v2": (
        lambda: _rebuild._rebuild_tensor_v2,
        lambda *args: len(args) > 3 and _no_longer(*args[2:4]),
    ),
    "torch._utils._rebuild_parameter": (
        lambda: _rebuild._rebuild_parameter,
        lambda *args: len(args) == 3,
    ),
}


def _constant(name: str) -> Any:
    """Return the storage type or dtype of a name that torch allows, or None."""
    allowed: Any = torchs._get_allowed_globals().get(name)
    return allowed if isinstance(allowed, _CONSTANTS) else None


def _is_known(name: str) -> bool:
    if name in _CALLS:
        return name in torchs._get_allowed_globals()
    return _constant(name) is not None


def _guarded(data: bytes, plain: PlainPickle) -> bytes:
    """Return a plain pickle that asks `persistent_load` to change objects."""
    parts: list[bytes] = []
    start = 0
    for at in plain.changes:
        parts += (data[start:at], _ASKS[data[at]])
        start = at + 1
    parts.append(data[start : plain.end])
    return b"".join(parts)


def _set_items(target: Any, items: tuple[Any, ...]) -> None:
    if type(target) not in _DICTIONARIES or len(items) % 2:
        raise _Refused("items")
    each = iter(items)
    for key, value in zip(each, each, strict=True):
        target[key] = value


def _extend(target: Any, items: tuple[Any, ...]) -> None:
    if type(target) is not list:
        raise _Refused("items of no list")
    target.extend(items)


def _append(target: Any, item: Any) -> None:
    if type(target) is not list:
        raise _Refused("an item of no list")
    target.append(item)


def _give_state(target: Any, state: Any) -> None:
    """Give state to an `OrderedDict`; tensors and storages, which others hold, get none."""
    if type(target) is not OrderedDict or type(state) is not dict:
        raise _Refused("state")
    vars(target).update(state)


_DICTIONARIES = (dict, OrderedDict)
_CHANGES: dict[bytes, Callable[[Any, Any], None]] = {
    b"u": _set_items,
    b"e": _extend,
    b"s": _set_items,
    b"a": _append,
    b"b": _give_state,
}


class _PlainUnpickler(pickle.Unpickler):
    """Decodes a plain pickle that `_guarded` gave."""

    def __init__(self, data: bytes, load_storage: Callable[[Any], Any]) -> None:
        super().__init__(cast("Any", io.BufferedReader(cast("Any", io.BytesIO(data)))))  # peeks
        self.failure: BaseException | None = None
        self._load_storage = load_storage
        self._calls: dict[str, _GuardedFunction] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _CALLS:
            return _constant(full)
        if full not in self._calls:
            function, fits = _CALLS[full]
            self._calls[full] = _GuardedFunction(function(), fits)
        return self._calls[full]

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not tuple or not pid:
            raise _Refused("persistent id")
        if type(pid[-1]) is bytes:
            target, argument, opcode = pid
            _CHANGES[opcode](target, argument)
            return target
        if type(pid[0]) is not str or pid[0] != "storage":
            raise _Refused("persistent id")
        try:
            return self._load_storage(pid)
        except BaseException as error:
            self.failure = error
            raise

    def loaned(self) -> list[weakref.ref[_GuardedFunction]]:
        """Return the stand-ins for functions, which must not be in what was loaded."""
        return [weakref.ref(call) for call in self._calls.values()]


class WeightsOnlyUnpickler(torchs.Unpickler):
    """Loads what torch's class loads, and fails as it does."""

    def __init__(self, file: io.BytesIO, *, encoding: str = "bytes") -> None:
        super().__init__(file, encoding=encoding)
        self._file = file

    def load(self) -> Any:
        data = self._file.getvalue()  # no copy: nobody wrote to it
        found = plain_pickle(data)
        if found is not None and all(map(_is_known, found.names)):
            plain = _PlainUnpickler(_guarded(data, found), self.persistent_load)
            try:
                value = plain.load()
                loaned = plain.loaned()
                del plain
                if all(call() is None for call in loaned):
                    return value
            except ours(Exception) as error:
                if error is plain.failure:
                    raise
        return cast("Any", super()).load()


_OURS = SimpleNamespace(**{**vars(torchs), "Unpickler": WeightsOnlyUnpickler})


def unpickler_module(stock: Any) -> Any:
    """Return what stands in for `_load`'s `pickle_module`: a faster weights-only unpickler."""
    if stock is not torchs or stock.Unpickler is not WeightsOnlyUnpickler.__base__:
        return stock
    return _OURS if current().fast_unpickler else stock
