"""Where a benchmark ran: a number without its machine says nothing."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastserial import __version__
from fastserial.config import Config
from fastserial.diagnosis.folder import Folder
from fastserial.files.meminfo import meminfo
from fastserial.printable import printable
from fastserial.reports import format_bytes

__all__ = ["Machine", "describe_folder", "describe_options", "plain_options", "this_machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, cores this process may use, memory (bytes), and versions."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    torch: str
    fastserial: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {format_bytes(self.memory_bytes)} memory, "
            f"{self.kernel}, Python {self.python}, torch {self.torch}, "
            f"fastserial {self.fastserial}"
        )


def this_machine() -> Machine:
    """Return what this process runs on."""
    return Machine(
        _cpu(),
        len(os.sched_getaffinity(0)),
        meminfo().get("MemTotal", 0),
        f"{platform.system()} {platform.release()}",
        platform.python_version(),
        str(torch.__version__),
        __version__,
    )


def describe_folder(folder: Folder) -> str:
    """Return file system, device and alignment in one line."""
    device = folder.device
    words = [folder.file_system]
    if device.name:
        words.append(f"on {' '.join(filter(None, (device.name, device.model)))}")
        if device.nbytes is not None:
            words.append(f"of {format_bytes(device.nbytes)}")
    if device.backing_file:
        words.append(f"(a loop device over {printable(device.backing_file)})")
    if folder.direct_problem is not None or folder.alignment is None:
        direct = "no direct I/O"
    else:
        told = "reported" if folder.alignment.kernel_reported else "assumed"
        direct = (
            f"direct I/O alignment {folder.alignment.memory}/{folder.alignment.offset} bytes "
            f"(memory/file, {told})"
        )
    return f"{' '.join(words)}, {format_bytes(folder.free_bytes)} free, {direct}"


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


def plain_options(options: Config) -> dict[str, Any]:
    """Return the options whose values are text or numbers, for JSON."""
    values = dataclasses.asdict(options)
    # the rest are functions that are called with reports
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}


def describe_options(options: Mapping[str, Any]) -> str:
    """Return them in one line."""
    return f"fastserial: {', '.join(f'{name}={value}' for name, value in options.items())}"
