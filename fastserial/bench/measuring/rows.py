"""A row: one way to write one checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastserial.bench.measuring.measure import Sample

__all__ = ["DURABLE", "LOOSE", "OVERHEAD", "OVERWRITE", "Row"]


DURABLE = "durable"
OVERWRITE = "durable, overwriting"
LOOSE = "not durable"
OVERHEAD = "no I/O (own cost)"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        name: what is measured.
        group: what it may be compared with: rows of one group give the same promise.
        run: writes a file or a directory at a path and returns what that took.
        stock: name of the row of stock torch that this one is compared with.
        same_bytes_as: name of a row above whose file this one's must equal.
        overwrites: writes over the file that the last overwriting row left.
        check: reads back what was written and returns whether it equals what was to be written;
            for formats that are compared by their content, not by their bytes.
    """

    name: str
    group: str
    run: Callable[[Path], Sample]
    stock: str | None = None
    same_bytes_as: str | None = None
    overwrites: bool = False
    check: Callable[[Path], bool] | None = None
