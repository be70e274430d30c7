"""torch.save and torch.load at the speed of the disk, crash-safe.

import fastserial
fastserial.install()
torch.save(state, "ckpt.pt")  # unchanged call, same bytes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserial.config import Config, options
from fastserial.errors import (
    ConfigError,
    EngineUnavailableError,
    FastserialError,
    PatchError,
    UnsupportedTorchWarning,
    WriteError,
)
from fastserial.patching import install, installed, status, uninstall
from fastserial.report import SaveReport, last_report

if TYPE_CHECKING:
    from fastserial.writer import FastFileWriter

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "EngineUnavailableError",
    "FastFileWriter",
    "FastserialError",
    "PatchError",
    "SaveReport",
    "UnsupportedTorchWarning",
    "WriteError",
    "__version__",
    "install",
    "installed",
    "last_report",
    "options",
    "status",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name == "FastFileWriter":  # needs torch; `import fastserial` alone does not
        from fastserial.writer import FastFileWriter

        return FastFileWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
