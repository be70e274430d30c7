"""`fastserial run`: a Python program, and every Python process it starts, with fastserial."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from fastserial.errors import FastserialError
from fastserial.startup import PROBE, VARIABLE

__all__ = ["run"]

_LONGEST = 4096  # bytes of a first line


def run(argv: Sequence[str]) -> NoReturn:
    """Become `python argv...`, or a command, with `FASTSERIAL=1` in the environment; never returns.

    Args:
        argv: what would follow `python`: `script.py args...` or `-m module args...`; or, if there
            is no such file, a command and its arguments: `torchrun script.py args...`.

    Raises:
        FastserialError: there is nothing to run, or fastserial does not load at start-up.
    """
    if not argv:
        raise FastserialError(
            "nothing to run: give `script.py args...`, `-m module args...` or `torchrun ...`"
        )
    environment = {**os.environ, VARIABLE: "1"}
    command = _command(argv[0])
    python = sys.executable if command is None else _python_of(command) or sys.executable
    # -O, -W, -X and the like, as multiprocessing passes them to its children
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if subprocess.run([python, *flags, "-c", PROBE], env=environment, check=False).returncode:
        raise FastserialError(
            f"fastserial.pth is not active in {python}, so the program would run without "
            "fastserial: install the package there (`pip install fastserial`, or `pip install "
            "-e .` in a checkout), or put `import fastserial.auto` into the program"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if command is not None:
        os.execve(command, [*argv], environment)
    os.execve(python, [python, *flags, *argv], environment)


def _command(word: str) -> str | None:
    """Return the path of a command, preferably next to this Python; None if it is none."""
    if word.startswith("-") or os.path.exists(word):
        return None
    return shutil.which(word, path=os.path.dirname(sys.executable)) or shutil.which(word)


def _python_of(command: str) -> str | None:
    """Return the Python that runs a command, None if it is no script of Python's."""
    with open(command, "rb") as file:
        first = file.readline(_LONGEST).decode("utf-8", "replace")
    words = first[2:].split() if first.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = words[1:]
    if not words or not os.path.basename(words[0]).startswith("python"):
        return None
    return shutil.which(words[0])
