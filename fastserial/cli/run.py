"""`fastserial run`: a Python program, and every Python process it starts, with fastserial."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from fastserial.errors import FastserialError
from fastserial.startup import PROBE, VARIABLE

_SHELL = "/bin/sh"
_LONGEST_LINE = 256  # bytes that the kernel reads of it


def run(argv: Sequence[str]) -> NoReturn:
    """Become `python argv...`, or a command, with `FASTSERIAL=1` in the environment; never returns.

    Args:
        argv: what would follow `python`: `script.py args...` or `-m module args...`; or a command
            and its arguments: `torchrun script.py args...`, `./launch.sh`.

    Raises:
        FastserialError: there is nothing to run, or fastserial does not load at start-up.
        OSError: the command cannot be started.
    """
    if not argv:
        raise FastserialError(
            "nothing to run: give `script.py args...`, `-m module args...` or `torchrun ...`"
        )
    environment = {**os.environ, VARIABLE: "1"}
    command = None if argv[0].startswith("-") else _command(argv[0])
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
    if command is None:
        os.execve(sys.executable, [sys.executable, *flags, *argv], environment)
    try:
        os.execve(command, [*argv], environment)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    os.execve(_SHELL, [_SHELL, command, *argv[1:]], environment)  # as shells do


def _command(name: str) -> str | None:
    """Return what is to be started, None if it is a program in Python, for this interpreter."""
    if os.path.isfile(name):
        return None if _is_python(name) else os.path.abspath(name)
    if os.path.exists(os.path.join(name, "__main__.py")):
        return None
    beside = os.path.dirname(sys.executable)
    return shutil.which(name, path=beside) or shutil.which(name)


def _is_python(path: str) -> bool:
    """Return whether a file is a program in Python: by its name, its first line, or its mode.

    A file of another name without a first line that names a program is one if it is not executable.
    """
    if path.endswith((".py", ".pyw", ".pyc", ".pyz")):
        return True
    with open(path, "rb") as file:
        line = file.readline(_LONGEST_LINE)
    return b"python" in line if line.startswith(b"#!") else not os.access(path, os.X_OK)
