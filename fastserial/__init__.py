"""torch.save at the speed of the disk, byte for byte, crash-safe.

import fastserial
fastserial.install()
torch.save(state, "ckpt.pt")  # unchanged call, same bytes
"""

from __future__ import annotations

import importlib
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
    from fastserial.fastpersist import (
        fastpersist_save,
        fastpersist_save_legacy,
        get_aio_handle,
        get_pinned_buffer,
    )
    from fastserial.inspection import inspect
    from fastserial.verification import verify
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
    "fastpersist_save",
    "fastpersist_save_legacy",
    "get_aio_handle",
    "get_pinned_buffer",
    "inspect",
    "install",
    "installed",
    "last_report",
    "options",
    "status",
    "uninstall",
    "verify",
]

# What needs torch or is seldom needed; `import fastserial` alone imports neither.
_LATER = {
    "FastFileWriter": "fastserial.writer",
    "fastpersist_save": "fastserial.fastpersist",
    "fastpersist_save_legacy": "fastserial.fastpersist",
    "get_aio_handle": "fastserial.fastpersist",
    "get_pinned_buffer": "fastserial.fastpersist",
    "inspect": "fastserial.inspection",
    "verify": "fastserial.verification",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
