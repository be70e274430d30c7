"""Run a command and draw what it prints as an SVG, as a terminal shows it.

`python docs/site/terminal.py docs/guide/crash.svg -- fastserial demo --crash --folder D`
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

_CHARACTER, _LINE, _MARGIN = 7.3, 18, 16  # of 12 px monospace
_FOLDER = re.compile(r" --folder \S+")


def draw(command: str, text: str) -> str:
    """Return a picture of a command and of its output."""
    lines = [f"$ {command}", *text.rstrip("\n").split("\n")]
    width = round(max(map(len, lines)) * _CHARACTER + 2 * _MARGIN)
    height = len(lines) * _LINE + 2 * _MARGIN
    drawn = [
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * (row + 0.75):.0f}" '
        f'fill="{"#8ce99a" if row == 0 else "#f1f3f5"}" xml:space="preserve">{escape(line)}</text>'
        for row, line in enumerate(lines)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="monospace" font-size="12">'
    )
    background = f'<rect width="{width}" height="{height}" rx="8" fill="#212529"/>'
    return "\n".join([head, background, *drawn, "</svg>\n"])


def main(target: Path, command: Sequence[str]) -> None:
    """Run the command, and write the picture."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shown = _FOLDER.sub(" --folder D", " ".join(command))
    target.write_text(draw(shown, done.stdout), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3:])
