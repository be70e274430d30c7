"""Where a benchmark ran: a number without its machine says nothing."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from fastserial import __version__
from fastserial.diagnosis.folder import FolderFacts
from fastserial.files.linux import meminfo
from fastserial.printable import printable
from fastserial.reports import format_bytes

__all__ = ["describe_folder", "describe_machine", "this_machine"]


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


def describe_machine(found: dict[str, Any]) -> str:
    """Return what `this_machine` found in one line."""
    return (
        f"{found['cpu']}, {found['cores']} cores, {format_bytes(found['memory_bytes'])} memory, "
        f"{found['kernel']}, Python {found['python']}, torch {found['torch']}, "
        f"fastserial {found['fastserial']}"
    )


def describe_folder(folder: FolderFacts) -> str:
    """Return file system and device in one line."""
    device = f" on {printable(folder.device)}" if folder.device else ""
    direct = "no direct I/O" if folder.direct_problem or not folder.alignment else "direct I/O"
    free = format_bytes(folder.free_bytes)
    return f"{folder.file_system}{device}, {free} free, {direct}"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "Model", "cpu model"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
