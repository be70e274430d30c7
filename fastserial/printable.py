"""Names from files, made safe to print.

A checkpoint names its tensors, records and imports as it likes: control characters in them would
move a terminal's cursor, a line break would forge a row of a table, and a lone surrogate cannot be
encoded at all.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

_SHOWN = 3


def printable(text: str) -> str:
    """Return a text with everything that is not shown as itself escaped, as `repr` does it.

    That is control characters (also of the C1 set), line breaks of all kinds, characters that
    reorder or hide text, unassigned ones and lone surrogates. Doing it twice changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class BoundedRepr:
    """Dataclasses whose `repr` shows a few elements of each list: notebooks print it as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        values: Any = self
        shown = (f"{one.name}={_bounded(getattr(self, one.name))}" for one in fields(values))
        return f"{type(self).__name__}({', '.join(shown)})"


def _bounded(value: Any) -> str:
    if not isinstance(value, list | tuple) or len(value) <= _SHOWN:
        return repr(value)
    texts = ", ".join(map(repr, value[:_SHOWN]))
    return f"[{texts}, ... and {len(value) - _SHOWN} more]"
