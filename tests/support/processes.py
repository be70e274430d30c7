"""Other processes of a test: a program of `tests/programs`, or Python with any arguments.

A program that has more to tell than text gives it to `answer`, and the test gets it from `ask`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parents[1] / "programs"
_ANSWER = "FASTSERIAL_TEST_ANSWER"


@dataclass(frozen=True)
class Ended:
    """A process that has ended: with this exit status, or by the signal -code."""

    code: int
    out: str
    err: str


def program(name: str) -> Path:
    """Return the program of that name, in whichever folder of `tests/programs`."""
    (found,) = PROGRAMS.rglob(f"{name}.py")
    return found


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this environment with these variables; what this process can import, others can."""
    path = os.pathsep.join(filter(None, sys.path))
    inherited = {name: text for name, text in os.environ.items() if name != "FASTSERIAL"}
    return {**inherited, "PYTHONPATH": path, **(variables or {})}


def command(*words: object, under: Sequence[str] = ()) -> list[str]:
    """Return what starts Python with these words, under another command (`unshare -m`)."""
    return [*under, sys.executable, *map(str, words)]


def python(
    *words: object,
    code: int | None = 0,
    under: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 240,
) -> Ended:
    """Run Python with these words until it ends.

    Args:
        code: the exit status that it must have; None: any.
        under: a command that runs it, such as `unshare -m`.
        variables: of the environment, beside this process's.

    Raises:
        AssertionError: it ended otherwise.
    """
    done = subprocess.run(
        command(*words, under=under),
        env=environment(variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert code is None or done.returncode == code, f"{done.returncode}: {done.stderr[-4000:]}"
    return Ended(done.returncode, done.stdout, done.stderr)


def run(name: str, *arguments: object, flags: Sequence[str] = (), **options: Any) -> Ended:
    """Run a program until it ends; flags are Python's, options those of `python`."""
    return python(*flags, program(name), *arguments, **options)


def start(
    *words: object, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start Python with these words; it is fed and read through pipes unless told otherwise."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **options}
    return subprocess.Popen(command(*words), text=True, env=environment(variables), **options)


def ask(name: str, *arguments: object, **options: Any) -> Any:
    """Run a program until it ends, and return what it gave to `answer`."""
    with tempfile.NamedTemporaryFile() as file:
        run(name, *arguments, variables={_ANSWER: file.name}, **options)
        return json.load(file)


def answer(result: Any) -> None:
    """Send the result to `ask`, once."""
    Path(os.environ[_ANSWER]).write_text(json.dumps(result), encoding="utf-8")
