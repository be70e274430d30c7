"""Names from files, made safe to print.

A checkpoint names its tensors, records and imports as it likes: control characters in them would
move a terminal's cursor, a line break would forge a row of a table, and a lone surrogate cannot be
encoded at all.
"""

from __future__ import annotations

__all__ = ["printable"]


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
