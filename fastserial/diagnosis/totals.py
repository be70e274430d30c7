"""`fastserial.summary()`: the saves and loads of this process, and how many of them torch did.

With `FASTSERIAL_SUMMARY=1` in the environment it is printed to standard error at exit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from fastserial.patching.install import status
from fastserial.printable import printable
from fastserial.reasons import Reason
from fastserial.reports import LOADS, SAVES, Counts, format_bandwidth, format_bytes

_UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason, the number of saves or loads with it, and what to do (None: not known)."""

    reason: str
    count: int
    remedy: str | None


@dataclass(frozen=True, slots=True)
class Direction:
    """Saves, or loads.

    Attributes:
        count: their number.
        by_torch: how many of them torch did itself.
        nbytes: bytes that fastserial moved.
        seconds: the time for these, also of saves in the background.
        why_torch: why torch did them itself.
        why_slower: why fastserial did not do them as fast as it can.
    """

    count: int
    by_torch: int
    nbytes: int
    seconds: float
    why_torch: tuple[Cause, ...]
    why_slower: tuple[Cause, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What `summary` returns; `str` of it is a table.

        print(fastserial.summary().saves)

    Attributes:
        installed: whether torch runs fastserial's functions now.
        reason: why not, or None.
        saves, loads: the counts. Not counted: loads from memory (`BytesIO`), and what torch did
            while fastserial was not installed.
    """

    installed: bool
    reason: str | None
    saves: Direction
    loads: Direction

    def __str__(self) -> str:
        used = any(one.count > one.by_torch for one in (self.saves, self.loads))
        stock = f"torch.save and torch.load are stock ({self.reason})"
        if used:  # by `save_async`, a `Checkpointer`, a plugin: they need no `install()`
            stock = f"used through its own functions; {stock}"
        rank = os.environ.get("RANK")
        who = f"fastserial (rank {rank})" if rank else "fastserial"
        first = f"{who}: {'installed' if self.installed else stock}"
        lines = (first, *_lines("saves", self.saves), *_lines("loads", self.loads))
        return "\n".join(map(printable, lines))


def summary() -> Summary:
    """Return the counts of this process's saves and loads, and why torch did some of them itself.

        print(fastserial.summary())

    `FASTSERIAL_SUMMARY=1` prints it when the interpreter exits.
    """
    found = status()
    return Summary(found.installed, found.reason, _direction(SAVES), _direction(LOADS))


def print_summary() -> None:
    """Print the summary to standard error."""
    stream = sys.stderr
    if stream is not None:
        stream.write(f"{summary()}\n")


def _direction(counts: Counts) -> Direction:
    moved = counts.count, counts.by_torch, counts.nbytes, counts.seconds
    return Direction(*moved, _causes_of(counts.reasons), _causes_of(counts.slower))


def _causes_of(reasons: dict[str | None, int]) -> tuple[Cause, ...]:
    ordered = sorted(dict(reasons).items(), key=lambda item: -item[1])
    return tuple(
        Cause(why or _UNKNOWN, count, why.remedy if isinstance(why, Reason) else None)
        for why, count in ordered
    )


def _lines(name: str, one: Direction) -> Iterator[str]:
    line = f"  {name}: {one.count}"
    if ours := one.count - one.by_torch:
        line += f", {ours} by fastserial: {format_bytes(one.nbytes)} in {one.seconds:.2f} s"
        if one.seconds:
            line += f", {format_bandwidth(one.nbytes / one.seconds)}"
    yield f"{line}, {one.by_torch} by torch itself" if one.by_torch else line
    for title, causes in (("by torch itself", one.why_torch), ("slower", one.why_slower)):
        for cause in causes:
            remedy = f" -> {cause.remedy}" if cause.remedy is not None else ""
            yield f"    {cause.count} {title}: {cause.reason}{remedy}"
