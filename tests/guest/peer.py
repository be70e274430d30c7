"""The other host: a guest that saves when the first one asks, until it is killed."""

from __future__ import annotations

import random
import time
from pathlib import Path

from children import NAME, Child, kill_in_a_save, saves, torch

SHARE = Path("/host-rw")


def save(mount: str, folder: str, number: str, delay: str) -> None:
    """Prepare a save, say so, and kill it up to so many milliseconds after it began."""
    options = {"nbytes": 16 << 20, "go": str(SHARE / f"go-{number}")}
    child = Child(saves, f"/{mount}/{folder}/{NAME}", int(number), options=options)
    child.wait_for("ready")
    answer(f"save-{mount}-{folder}-{number}-{delay}", "ready")
    kill_in_a_save(child, random.Random(int(number)), int(delay) / 1000)


def die(mount: str, folder: str, number: str) -> None:
    """Save again and again, and keep the shared folder up to date, until the host ends it all."""
    child = Child(saves, f"/{mount}/{folder}/{NAME}", int(number), 10_000)
    child.wait_for("start")
    while True:
        child._listen(0.01)
        if len(child.said) > 4:
            (SHARE / "saving.new").write_text(f"{child.last('done')} {child.last('start')}")
            (SHARE / "saving.new").rename(SHARE / "saving")


def answer(asked: str, text: str) -> None:
    (SHARE / f"{asked}.new").write_text(text)
    (SHARE / f"{asked}.new").rename(SHARE / f"{asked}.answer")


def main() -> None:
    torch.set_num_threads(1)
    (SHARE / "peer-is-up").touch()
    done: set[str] = set()
    while True:
        for asked in sorted(SHARE.glob("*.ask")):
            if asked.name in done or asked.with_suffix(".answer").exists():
                continue
            done.add(asked.name)
            word, *words = asked.stem.split("-")
            # a folder's name has a dash of its own
            mount, folder, rest = words[0], "-".join(words[1:3]), words[3:]
            if word == "save":
                save(mount, folder, *rest)
            else:
                die(mount, folder, *rest)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
