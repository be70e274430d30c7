"""What became of the bytes of one file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserial.formats.extents import Hole

if TYPE_CHECKING:
    from fastserial.saving.fill import Part

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Bytes of one file, by who wrote them.

    Attributes:
        engine: written by the engine.
        plain: written without it (the rest of the last page, small files).
        skipped: holes that were not written.
    """

    engine: int = 0
    plain: int = 0
    skipped: int = 0

    def add_plain(self, parts: Iterable[Part]) -> None:
        """Count parts that were written without the engine; their holes were not written."""
        for part in parts:
            if type(part.source) is Hole:
                self.skipped += part.length
            else:
                self.plain += part.length
