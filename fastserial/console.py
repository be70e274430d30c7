"""Output of the commands: plain lines and tables; text from files is made safe to print here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from fastserial.printable import printable

_WIDEST_COLUMN = 60
_GAP = "  "


def say(text: object, *, err: bool = False) -> None:
    """Print one line to standard output, or to standard error; a line break in it is escaped."""
    typer.echo(printable(str(text)), err=err)


def counted(count: int, noun: str) -> str:
    """Return `1 tensor`, `2 tensors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows below their heads. Numbers are aligned to the right.

    A cell that is wider than 60 characters moves what is to its right.
    """
    cells = [[printable(str(cell)) for cell in row] for row in (columns, *rows)]
    widths = [min(max(map(len, column)), _WIDEST_COLUMN) for column in zip(*cells, strict=True)]
    lines = []
    for texts, values in zip(cells, (columns, *rows), strict=True):
        padded = (
            text.rjust(width) if isinstance(value, int) else text.ljust(width)
            for text, value, width in zip(texts, values, widths, strict=True)
        )
        lines.append(_GAP.join(padded).rstrip())
    typer.echo("\n".join(lines))
