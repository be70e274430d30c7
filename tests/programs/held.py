"""Saves over files that this process has open, with no thread beside: `held.py FOLDER`.

Prints what each case gave, with stock and with fastserial, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import fastserial

_SMALL = {"x": torch.arange(1000.0)}


def read_behind(path: Path) -> int:
    """Save over a file that is open for reading; return the bytes it shows behind the handle."""
    torch.save({"x": torch.zeros(3)}, path)
    with path.open("rb") as file:
        torch.save(_SMALL, path)
        return len(file.read())


class Saver:
    """Saves over its own file when it is loaded."""

    path: Path

    def __setstate__(self, state: Any) -> None:
        torch.save(_SMALL, self.path)


def save_while_loading(path: Path) -> str | None:
    """Return the fallback of a save to a file that is just being loaded."""
    Saver.path = path
    made = Saver()
    made.x = torch.zeros(3_000_000)  # type: ignore[attr-defined]
    torch.save(made, path)
    torch.load(path, weights_only=False)
    report = fastserial.last_save_report()
    if report is None:
        raise RuntimeError("fastserial did not save")
    return report.fallback


def main() -> None:
    folder = Path(sys.argv[1])
    answers: dict[str, Any] = {"stock": read_behind(folder / "a.pt")}
    fastserial.install()
    answers["fast"] = read_behind(folder / "a.pt")
    answers["loading"] = save_while_loading(folder / "b.pt")
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
