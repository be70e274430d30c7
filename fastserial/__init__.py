"""torch.save and torch.load at the speed of the disk, byte for byte, crash-safe.

import fastserial
fastserial.install()
torch.save(state, "ckpt.pt")  # unchanged call, same bytes
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` itself takes longer to import than all of this
if TYPE_CHECKING:  # what type checkers see of `_HOMES`, below
    from typing import Any

    # isort: off
    from fastserial import distributed as distributed
    from fastserial.checkpoints.inspect import inspect as inspect
    from fastserial.checkpoints.lazy import open_checkpoint
    from fastserial.checkpoints.load import load as load
    from fastserial.checkpoints.load_into import load_into as load_into
    from fastserial.checkpoints.save import save as save
    from fastserial.checkpoints.verify import verify as verify
    from fastserial.config import Config as Config, options as options
    from fastserial.diagnosis.totals import Summary as Summary, summary as summary
    from fastserial.distributed.convert import convert as convert
    from fastserial.errors import (
        CheckpointKeyError as CheckpointKeyError,
        CheckpointReplacedError as CheckpointReplacedError,
        ConfigError as ConfigError,
        ConvertError as ConvertError,
        CorruptCheckpointError as CorruptCheckpointError,
        DistributedError as DistributedError,
        EngineUnavailableError as EngineUnavailableError,
        FastserialError as FastserialError,
        LoadMismatchError as LoadMismatchError,
        MismatchedCallError as MismatchedCallError,
        PatchError as PatchError,
        StorageChangedError as StorageChangedError,
        UnmetOptionWarning as UnmetOptionWarning,
        UnreadableCheckpointError as UnreadableCheckpointError,
        UnreadableTensorError as UnreadableTensorError,
        UnsupportedTorchWarning as UnsupportedTorchWarning,
        WriteError as WriteError,
    )
    from fastserial.memory.buffers import free_pinned as free_pinned
    from fastserial.overlap.asynchronous import save_async as save_async
    from fastserial.overlap.pending import PendingSave as PendingSave, wait_all as wait_all
    from fastserial.patching.install import (
        install as install,
        installed as installed,
        status as status,
        uninstall as uninstall,
    )
    from fastserial.reports import (
        LoadReport as LoadReport,
        SaveReport as SaveReport,
        last_load_report as last_load_report,
        last_save_report as last_save_report,
    )
    from fastserial.saving.writer import FastFileWriter as FastFileWriter
    from fastserial.training.checkpointer import Checkpointer as Checkpointer

    open = open_checkpoint

__version__ = "0.1.0"

# By module, so that `import fastserial` alone costs nothing: with `FASTSERIAL=1` every process of
# a job imports it at its start.
_HOMES = {
    "checkpoints.inspect": "inspect",
    "checkpoints.lazy": "open",
    "checkpoints.load": "load",
    "checkpoints.load_into": "load_into",
    "checkpoints.save": "save",
    "checkpoints.verify": "verify",
    "config": "Config options",
    "distributed.convert": "convert",
    "diagnosis.totals": "Summary summary",
    "errors": (
        "CheckpointKeyError CheckpointReplacedError ConfigError ConvertError "
        "CorruptCheckpointError DistributedError EngineUnavailableError FastserialError "
        "LoadMismatchError MismatchedCallError PatchError StorageChangedError "
        "UnmetOptionWarning UnreadableCheckpointError UnreadableTensorError "
        "UnsupportedTorchWarning WriteError"
    ),
    "memory.buffers": "free_pinned",
    "overlap.asynchronous": "save_async",
    "overlap.pending": "PendingSave wait_all",
    "patching.install": "install installed status uninstall",
    "reports": "LoadReport SaveReport last_load_report last_save_report",
    "saving.writer": "FastFileWriter",
    "training.checkpointer": "Checkpointer",
}
_LATER = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = ["__version__", *_LATER]
_CALLED = {"open": "open_checkpoint"}  # in its module


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LATER:
        module = import_module(f"{__name__}.{_LATER[name]}")
        value = globals()[name] = getattr(module, _CALLED.get(name, name))
        return value
    if name in _HOMES or name == "distributed":
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def _print_summary_at_exit() -> None:
    """Print the summary when the interpreter exits, if the environment asks for it."""
    import os

    if os.environ.get("FASTSERIAL_SUMMARY"):
        from fastserial.startup import checked_switch

        if checked_switch("FASTSERIAL_SUMMARY"):
            import atexit

            atexit.register(_summarize)


def _summarize() -> None:
    import sys

    if f"{__name__}.reports" in sys.modules:  # else nothing was saved or loaded
        from fastserial.diagnosis.totals import print_summary

        print_summary()


_print_summary_at_exit()
