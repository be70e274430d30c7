"""Output of the commands: text from files is made safe to print here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from fastserial.printable import printable

__all__ = ["counted", "new_console", "print_table", "say"]

_WIDTH_OF_FILES = 150
_WIDEST_COLUMN = 60
_GAP = "  "


class _SafeConsole(Console):
    """A console that shows control characters instead of obeying them."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def new_console() -> Console:
    """Return a console for standard output, wide enough for tables in a file or pipe.

    A line break in what it prints is escaped, too: print line by line.
    """
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return _SafeConsole(highlight=False, emoji=False, width=width)


def say(text: object, *, err: bool = False) -> None:
    """Print one line to standard output, or to standard error."""
    typer.echo(printable(str(text)), err=err)


def counted(count: int, noun: str) -> str:
    """Return `1 tensor`, `2 tensors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Print rows of any number below each other, without markup, quickly.

    A cell that is wider than 60 characters moves what is to its right. (A table of rich's
    takes half a millisecond for each row.)
    """
    cells = [[printable(str(cell)) for cell in row] for row in (columns, *rows)]
    widths = [min(max(map(len, column)), _WIDEST_COLUMN) for column in zip(*cells, strict=True)]
    if title:
        console.print(title, markup=False, style="bold", soft_wrap=True)
    head, *body = _lines(cells, widths)
    console.print(head, markup=False, style="bold", soft_wrap=True)
    console.file.write("".join(f"{line}\n" for line in body))


def _lines(rows: list[list[str]], widths: list[int]) -> Iterator[str]:
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield _GAP.join(padded).rstrip()
