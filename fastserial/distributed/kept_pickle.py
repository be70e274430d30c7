"""The pickle of the last save, brought up to date: what stock would write now, without pickling.

From one save to the next numbers change: steps, learning rates. Python's pickler writes each of
them by itself, so in the pickle it can be replaced. To know that nothing else changed, the state is
pickled again without its tensors, which is what takes the time, and without its numbers.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
import types
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["KeptPickle", "Outline", "outline_of"]

_PROTOCOL = 2
# Strings that torch puts into every pickle, so that a state's own may be the same objects.
_WORDS = ("storage", "cpu")
_NUMBERS = {int, float, bool, type(None)}
# Whose objects are pickled by what they are made of, and nothing else.
_MODULES = {"builtins", "collections", "datetime", "decimal", "numpy", "pathlib", "torch"}
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


class Outline:
    """A state without its tensors' bytes.

    Attributes:
        text: its pickle without tensors and numbers.
        numbers: these, in the order of the pickle.
        before: how many numbers come before each tensor, by the tensor's `id`.
    """

    __slots__ = ("before", "numbers", "text")

    def __init__(self) -> None:
        self.text = b""
        self.numbers: list[Any] = []
        self.before: dict[int, int] = {}

    def numbers_text(self) -> bytes:
        """Return the numbers as bytes, which tell 1 from True and 1.0."""
        return pickle.dumps(self.numbers, _PROTOCOL)


class _Unknown(Exception):
    """An object of which the pickle may depend on more than what it is made of."""


def outline_of(state: object, tensors: Mapping[int, int]) -> Outline | None:
    """Return the outline of a state.

    Args:
        tensors: numbers of its tensors, by their `id`.

    Returns:
        None: it holds what makes its own pickle, and may make another one every time.
    """
    found = Outline()
    numbers, before = found.numbers, found.before
    take, number_of = numbers.append, tensors.get
    text = io.BytesIO()
    known: dict[type, bool] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            kind = type(obj)
            if kind is str:  # as most are: keys
                return None
            number = number_of(id(obj))
            if number is not None:
                before.setdefault(id(obj), len(numbers))
                return number + 1
            if kind in _NUMBERS:
                take(obj)
                return 0
            return None

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind not in known:
                known[kind] = isinstance(obj, _NAMED) or _is_plain(kind)
            if not known[kind]:
                raise _Unknown
            return NotImplemented

    pickler = Pickler(text, _PROTOCOL)
    try:
        pickler.dump((_WORDS, state))
    except Exception:  # whatever it is, torch's own pickling of the state will meet it
        return None
    found.text = text.getvalue()
    return found


def _is_plain(kind: type) -> bool:
    """Return whether objects of a type are pickled by their attributes or items alone."""
    if issubclass(kind, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
        return False
    if kind.__module__.partition(".")[0] in _MODULES:
        return True
    return (
        kind not in copyreg.dispatch_table
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        and not hasattr(kind, "__getnewargs_ex__")
        and not hasattr(kind, "__getnewargs__")
    )


class KeptPickle:
    """The last pickle, and where in it the numbers are."""

    def __init__(self, text: bytes, outline: Outline, ends: Mapping[int, int]) -> None:
        """Find the numbers.

        Args:
            text: the pickle.
            outline: of what was pickled.
            ends: the number under which the pickle remembers each tensor, by the tensor's `id`:
                what comes before that is the tensor itself.

        Raises:
            ValueError: the numbers are not where they should be.
        """
        self._text = text
        self._outline = outline.text
        self._numbers = outline.numbers_text()
        self._firsts, self._stops = array("q"), array("q")
        found = sorted((ends[key], count) for key, count in outline.before.items())
        marks = dict(found)
        self._find(marks, len(outline.numbers))
        pieces = zip(outline.numbers, self._firsts, self._stops, strict=True)
        if any(text[first:stop] != _encoded(number) for number, first, stop in pieces):
            raise ValueError("a number is not where it should be")

    def _find(self, marks: Mapping[int, int], count: int) -> None:
        """Enter the places of the numbers that belong to no tensor.

        Between two tensors come first the numbers that lie between them, then the second
        tensor's own.
        """
        pending: list[tuple[int, int]] = []
        for memo, first, stop in _tokens(self._text):
            if memo < 0:
                pending.append((first, stop))
            elif memo in marks:
                self._take(pending[: marks[memo] - len(self._firsts)])
                pending.clear()
        self._take(pending)
        if len(self._firsts) != count:
            raise ValueError("there are not as many numbers")

    def _take(self, places: list[tuple[int, int]]) -> None:
        for first, stop in places:
            self._firsts.append(first)
            self._stops.append(stop)

    def now(self, outline: Outline) -> bytes | None:
        """Return the pickle of a state with this outline, None if that needs pickling."""
        if outline.text != self._outline:
            return None
        numbers = outline.numbers_text()
        if numbers == self._numbers:
            return self._text
        return self._with(outline, numbers)

    def _with(self, outline: Outline, numbers: bytes) -> bytes:
        """Put other numbers in."""
        text = self._text
        parts: list[bytes] = []
        at = shift = 0
        for index, number in enumerate(outline.numbers):
            first, stop = self._firsts[index], self._stops[index]
            new = _encoded(number)
            self._firsts[index] += shift
            if new != text[first:stop]:
                parts += (text[at:first], new)
                at = stop
                shift += len(new) - (stop - first)
            self._stops[index] += shift
        self._text = b"".join((*parts, text[at:]))
        self._numbers = numbers
        return self._text


def _encoded(number: object) -> bytes:
    """Return a number as Python's pickler writes it."""
    return pickle.dumps(number, _PROTOCOL)[2:-1]


def _sizes() -> list[int]:
    """Return the bytes of each operation with its argument, 0 where that depends on it."""
    sizes = [0] * 256
    for code in pickletools.opcodes:
        length = 0 if code.arg is None else code.arg.n
        sizes[ord(code.code)] = 1 + length if length >= 0 else 0
    return sizes


_SIZES: list[int] = []
_PLAIN_NUMBERS = b"KMJG\x88\x89N"
_PUT, _LONG_PUT, _GLOBAL = b"qrc"
_WITH_LENGTH = {ord("X"): 4, ord("U"): 1, ord("T"): 4, 0x8A: 1, 0x8B: 4}


def _tokens(text: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield what is a number, as (-1, first byte, end), and what is remembered: (number, 0, 0).

    Raises:
        ValueError: there is an operation that Python's pickler does not use in this protocol.
    """
    if not _SIZES:
        _SIZES.extend(_sizes())
    sizes = _SIZES
    at, end = 0, len(text)
    while at < end:
        code = text[at]
        size = sizes[code]
        if not size:
            if code == _GLOBAL:
                size = text.index(b"\n", text.index(b"\n", at) + 1) + 1 - at
            elif code in _WITH_LENGTH:
                wide = _WITH_LENGTH[code]
                length = int.from_bytes(text[at + 1 : at + 1 + wide], "little")
                size = 1 + wide + length
            else:
                raise ValueError(f"there is {text[at : at + 1]!r}")
        if code in _PLAIN_NUMBERS or code in (0x8A, 0x8B):
            yield -1, at, at + size
        elif code == _PUT:
            yield text[at + 1], 0, 0
        elif code == _LONG_PUT:
            yield int.from_bytes(text[at + 1 : at + 5], "little"), 0, 0
        at += size
