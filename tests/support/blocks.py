"""The code blocks of a page of documentation, and which of them are run.

A block of `python` or `sh` is run, in the order of the page, in one process and one folder. One
with a title (`python title="train.py"`) is a file, which later blocks run. A comment before a block
says what it needs, or why nobody runs it:

    <!-- needs: ray, dlio_benchmark -->
    <!-- not run: as root, half an hour -->
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<info>.*)$")
_NOTE = re.compile(r"^ *<!-- (?P<kind>not run|needs): (?P<text>.+) -->$")
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')
RUN = ("python", "sh")


class BadPage(Exception):
    """A page cannot be read as it is written."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of its first line of code, from 1.
        title: the name of the file that it is, if it is one.
        not_run: why nobody runs it.
        needs: modules without which it is not run.
    """

    language: str
    text: str
    line: int
    title: str | None = None
    not_run: str | None = None
    needs: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether it claims to run."""
        return self.language in RUN and self.not_run is None

    def missing(self) -> list[str]:
        """Return the modules that it needs and that are not there."""
        return [name for name in self.needs if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    """Return whether there is such a module; a folder of tests of that name is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order.

    Raises:
        BadPage: a fence is not closed, or a comment about a block has none behind it.
    """
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").split("\n")
    note: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if (fence := _FENCE.match(line)) is None:
            if note is not None and line.strip():
                raise BadPage(f"{page.name}:{number}: {note[0]} is not followed by a block")
            note = _NOTE.match(line) or note
            continue
        first, depth = number, len(fence["indent"])
        while number < len(lines) and lines[number].strip() != fence["marks"]:
            number += 1
        if number == len(lines):
            raise BadPage(f"{page.name}:{first}: this block has no end")
        text = "\n".join(code[depth:] for code in lines[first:number]) + "\n"
        found.append(_block(fence["info"], text, first + 1, note))
        note = None
        number += 1
    return found


def _block(info: str, text: str, line: int, note: re.Match[str] | None) -> Block:
    language = info.split()[0] if info.split() else ""
    title = _TITLE.search(info)
    return Block(
        language,
        text,
        line,
        title["title"] if title else None,
        note["text"] if note and note["kind"] == "not run" else None,
        tuple(re.split(r",\s*", note["text"])) if note and note["kind"] == "needs" else (),
    )
