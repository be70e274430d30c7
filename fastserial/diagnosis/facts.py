"""What the doctor found, as values."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from fastserial.diagnosis.folder import Folder
from fastserial.engines import EngineStatus
from fastserial.engines.gds.host import GpuHost

__all__ = ["Boot", "Diagnosis", "Finding", "Option", "Torch"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know, and what to do. `slow`: it makes saves stock or slow, or lets them fail.

    `fails`: it lets them fail.
    """

    text: str
    remedy: str
    slow: bool
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch: the patch tried on it, and why it would stay stock (`reason`)."""

    version: str | None
    patch: str | None = None
    exact: bool = False
    functions: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    reason: str | None = None
    self_check: str | None = None
    cuda: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """An option in force, and where its value comes from."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Boot:
    """Starting with Python: the variable FASTSERIAL, and whether `fastserial.pth` is at work."""

    variable: str | None
    switch: bool | None
    pth: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that the doctor found. Sizes are bytes.

    `small_pages` is why buffers get no huge pages, or None if they do.
    `gpus` is None without a driver of NVIDIA's.
    """

    fastserial: str
    python: str
    kernel: str
    torch: Torch
    boot: Boot
    engine: str
    engine_source: str
    engines: tuple[EngineStatus, ...]
    options: tuple[Option, ...]
    options_problem: str | None
    unknown_variables: tuple[str, ...]
    small_pages: str | None
    folder: Folder | None
    findings: tuple[Finding, ...] = ()
    gpus: GpuHost | None = None

    @property
    def fast(self) -> bool:
        """Whether nothing makes saves stock or slow."""
        return not any(finding.slow for finding in self.findings)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({"fast": self.fast, **dataclasses.asdict(self)}, indent=2, default=str)
