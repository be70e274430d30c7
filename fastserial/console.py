"""Where commands print to."""

from __future__ import annotations

import sys

from rich.console import Console

__all__ = ["new_console"]

_WIDTH_OF_FILES = 150


def new_console() -> Console:
    """Return a console for standard output, wide enough for tables in a file or pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
