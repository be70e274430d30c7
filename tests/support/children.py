"""Programs of `tests/programs` that send a result back, and what they share with their tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["SMALL", "answer", "arguments", "child", "raised", "save"]

SMALL = {"x": torch.arange(1000.0)}
_PROGRAMS = Path(__file__).parents[1] / "programs"


def child(program: str, *args: object, **options: Any) -> Any:
    """Run a program in a process of its own; return what it gives to `answer`."""
    read, write = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        command = [sys.executable, str(_PROGRAMS / program), str(write), *map(str, args)]
        options = {"stderr": subprocess.PIPE, "timeout": 120, **options}
        done = subprocess.run(command, env=environment, pass_fds=(write,), **options)
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pipe.read()
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(result)


def arguments() -> list[str]:
    """The arguments that `child` was given, in the program."""
    return sys.argv[2:]


def answer(result: Any) -> None:
    """Send the result to `child`, once."""
    os.write(int(sys.argv[1]), json.dumps(result).encode())


def save(f: Any, fmt: str, live: Any = SMALL) -> None:
    """`torch.save` in the format `zip` or `legacy`."""
    torch.save(live, f, _use_new_zipfile_serialization=fmt == "zip")


def raised(call: Callable[..., object], *arguments: Any) -> BaseException | None:
    """What a call raises, interrupts included."""
    try:
        call(*arguments)
    except BaseException as error:
        error.__traceback__ = None
        return error
    return None
