"""What became of the bytes of one file: by which route they went, and who wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserial.formats.extents import Hole
from fastserial.reports import HOST_ONLY, Transfer

if TYPE_CHECKING:
    from fastserial.saving.fill import Part

__all__ = ["Outcome"]


@dataclass(slots=True)
class Outcome:
    """What an `ExtentWriter` did so far, for the report. All of it is known once that is closed.

    Attributes:
        engine: the engine's name, or `buffered` as long as there was no need for one.
        direct: whether direct I/O was used last.
        fallback: why the bytes did not go the fastest way, or None.
        transfer: the transfer type taken, and why.
        submit_seconds: latencies from queueing a block until its transfer starts.
        complete_seconds: latencies of the transfers themselves.
        engine_bytes: written by the engine.
        plain_bytes: written without it (the rest of the last page, small files).
        skipped_bytes: holes that were not written.
    """

    engine: str = "buffered"
    direct: bool = False
    fallback: str | None = None
    transfer: Transfer = HOST_ONLY
    submit_seconds: list[float] = field(default_factory=list)
    complete_seconds: list[float] = field(default_factory=list)
    engine_bytes: int = 0
    plain_bytes: int = 0
    skipped_bytes: int = 0

    def add_plain(self, parts: Iterable[Part]) -> None:
        """Count parts that were written without the engine; their holes were not written."""
        for part in parts:
            if type(part.source) is Hole:
                self.skipped_bytes += part.length
            else:
                self.plain_bytes += part.length
