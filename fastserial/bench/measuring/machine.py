"""Where a benchmark ran: a number without its machine says nothing."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastserial import __version__
from fastserial.config import Config
from fastserial.diagnosis.folder import Folder, probe_folder
from fastserial.files.meminfo import meminfo
from fastserial.printable import printable
from fastserial.reports import format_bytes

__all__ = ["Machine", "Place", "describe_folder", "this_machine"]


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a benchmark ran, and the options of fastserial there."""

    machine: Machine
    folder: Folder
    options: dict[str, Any]

    @classmethod
    def of(cls, folder: Path, options: Config) -> Place:
        """Return this machine with a folder; of the options those that are text or numbers."""
        values = dataclasses.asdict(options)  # the rest are functions that get reports
        plain = {name: one for name, one in values.items() if isinstance(one, str | int | float)}
        return cls(this_machine(), probe_folder(folder), plain)

    def __str__(self) -> str:
        """Return machine and folder in a line each."""
        return f"{self.machine}\n{describe_folder(self.folder)}"
