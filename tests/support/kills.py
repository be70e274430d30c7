"""Programs that end in the middle of something."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch


def kill_in(number: int, name: str) -> None:
    """Kill this process before it writes a file of that name for the so many-th time."""
    save, count = torch.save, 0

    def hit(obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
        nonlocal count
        if os.path.basename(str(f)) == name:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
        save(obj, f, *arguments, **named)

    torch.save = hit
