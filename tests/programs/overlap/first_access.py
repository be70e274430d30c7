"""A signal handler asks for `save_async` while its module is being imported for the first time."""

from __future__ import annotations

import importlib.abc
import os
import signal
import sys
from typing import Any

import torch

import fastserial

path = sys.argv[1]
made: list[Any] = []


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing, and sends the signal when the second half of the import begins."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "fastserial.overlap.snapshot":
            os.kill(os.getpid(), signal.SIGUSR1)


def handler(*_: object) -> None:
    made.append(fastserial.save_async({"x": torch.ones(3)}, path))


signal.signal(signal.SIGUSR1, handler)
sys.meta_path.insert(0, Finder())
fastserial.save_async({"x": torch.zeros(3)}, f"{path}.other").wait()
made[0].wait()
print("saved")
