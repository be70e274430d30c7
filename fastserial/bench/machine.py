"""Where a benchmark ran: a number without its machine says nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from fastserial import __version__
from fastserial.files.linux import meminfo


def this_machine() -> dict[str, Any]:
    """Return processor, cores this process may use, memory (bytes), and versions."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": meminfo().get("MemTotal", 0),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "fastserial": __version__,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()
