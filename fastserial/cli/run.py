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
    command = None
    if not argv[0].startswith("-") and not os.path.exists(argv[0]):
        beside = os.path.dirname(sys.executable)
        command = shutil.which(argv[0], path=beside) or shutil.which(argv[0])
    # -O, -W, -X and the like, as multiprocessing passes them to its children
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    probe = [sys.executable, *flags, "-c", PROBE]
    if subprocess.run(probe, env=environment, check=False).returncode:
        raise FastserialError(
            f"fastserial.pth is not active in {sys.executable}, so the program would run without "
            "fastserial: install the package there (`pip install fastserial`, or `pip install "
            "-e .` in a checkout), or put `import fastserial.auto` into the program"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    words = [*argv] if command is not None else [sys.executable, *flags, *argv]
    os.execve(command or sys.executable, words, environment)
