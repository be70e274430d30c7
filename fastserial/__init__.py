"""torch.save and torch.load at the speed of the disk, byte for byte, crash-safe.

import fastserial
fastserial.install()
torch.save(state, "ckpt.pt")  # unchanged call, same bytes
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastserial.config import Config, options
from fastserial.errors import (
    CheckpointKeyError,
    ConfigError,
    ConvertError,
    CorruptCheckpointError,
    EngineUnavailableError,
    FastserialError,
    LoadMismatchError,
    PatchError,
    UnreadableCheckpointError,
    UnreadableTensorError,
    UnsupportedTorchWarning,
    WriteError,
)
from fastserial.loadreport import LoadReport, last_load_report
from fastserial.patching import install, installed, status, uninstall
from fastserial.report import SaveReport, last_report

if TYPE_CHECKING:
    from fastserial.conversion import convert
    from fastserial.fastpersist import (
        fastpersist_save,
        fastpersist_save_legacy,
        get_aio_handle,
        get_pinned_buffer,
    )
    from fastserial.filling import load_into
    from fastserial.inspection import inspect
    from fastserial.lazyfile import open_checkpoint as open
    from fastserial.loading import load
    from fastserial.verification import verify
    from fastserial.writer import FastFileWriter

__version__ = "0.1.0"

__all__ = [
    "CheckpointKeyError",
    "Config",
    "ConfigError",
    "ConvertError",
    "CorruptCheckpointError",
    "EngineUnavailableError",
    "FastFileWriter",
    "FastserialError",
    "LoadMismatchError",
    "LoadReport",
    "PatchError",
    "SaveReport",
    "UnreadableCheckpointError",
    "UnreadableTensorError",
    "UnsupportedTorchWarning",
    "WriteError",
    "__version__",
    "convert",
    "fastpersist_save",
    "fastpersist_save_legacy",
    "get_aio_handle",
    "get_pinned_buffer",
    "inspect",
    "install",
    "installed",
    "last_load_report",
    "last_report",
    "load",
    "load_into",
    "open",
    "options",
    "status",
    "uninstall",
    "verify",
]

# What needs torch or is seldom needed; `import fastserial` alone imports neither.
_LATER = {
    "FastFileWriter": "fastserial.writer:FastFileWriter",
    "convert": "fastserial.conversion:convert",
    "fastpersist_save": "fastserial.fastpersist:fastpersist_save",
    "fastpersist_save_legacy": "fastserial.fastpersist:fastpersist_save_legacy",
    "get_aio_handle": "fastserial.fastpersist:get_aio_handle",
    "get_pinned_buffer": "fastserial.fastpersist:get_pinned_buffer",
    "inspect": "fastserial.inspection:inspect",
    "load": "fastserial.loading:load",
    "load_into": "fastserial.filling:load_into",
    "open": "fastserial.lazyfile:open_checkpoint",
    "verify": "fastserial.verification:verify",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        module, _, attribute = _LATER[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
