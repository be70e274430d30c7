"""Lightning's checkpoints through fastserial, for `Trainer` and `Fabric`.

    from fastserial.integrations.lightning import FastCheckpointIO

    trainer = Trainer(plugins=[FastCheckpointIO()])

`FastAsyncCheckpointIO` writes during training. They replace `TorchCheckpointIO` and
`AsyncCheckpointIO`, of `lightning` and of `pytorch_lightning`: the files are the same, byte for
byte, but durable, and made without a copy of the whole state in memory. URLs (`s3://`, ...) and a
torch without a patch are left to Lightning's `TorchCheckpointIO`. No `install()` is needed.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
import threading
from functools import partial
from typing import Any

import torch

from fastserial.checkpoints.load import load
from fastserial.checkpoints.save import write
from fastserial.config import current, options
from fastserial.files.durable import make_folder
from fastserial.files.nodes import is_node, open_node
from fastserial.import_hook import when_imported
from fastserial.interrupts import ours, suppress
from fastserial.overlap.asynchronous import check_budget, start_save
from fastserial.overlap.pending import PendingSave
from fastserial.patching.install import patched

__all__ = ["FastAsyncCheckpointIO", "FastCheckpointIO"]

_FABRIC = ("lightning.fabric", "lightning_fabric")
TRAINER = ("lightning.pytorch", "pytorch_lightning")
_PREFIX = "archive"  # torch's name for an archive in a BytesIO, which Lightning saves to
_log = logging.getLogger("fastserial")

Path = str | os.PathLike[str]


def _in_memory(storage: Any, location: str) -> Any:
    """Leave a storage in host memory: Lightning's default `map_location`."""
    return storage


class FastCheckpointIO:
    """Saves and loads as Lightning's `TorchCheckpointIO` does, at the speed of the disk.

    A save returns when the file is durable; until then the path has the previous one.
    """

    def __init__(self, *, verify: bool | None = None) -> None:
        """Make a plugin.

        Args:
            verify: check every CRC-32 while a checkpoint is loaded, as the option
                `verify_on_load` does.
        """
        self._verify = verify
        self._stock: Any = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; an existing file or link is replaced as a whole.

        If fastserial cannot replace the file, Lightning writes it: it pickles into memory first, so
        that an object that cannot be pickled leaves the old file.

        Raises:
            WriteError: the file cannot be written; the previous one is intact.
            TypeError: `storage_options` are given, which Lightning's plugins refuse, too.
        """
        local = local_path(path)
        if local is None or storage_options is not None or patched("_save") is None:
            stock = self._lightnings_own()
            stock.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        make_folder(os.path.dirname(local), current().durable)
        self._write(checkpoint, local)

    def load_checkpoint(
        self,
        path: Path,
        map_location: Any = _in_memory,
        weights_only: bool | None = None,
        *,
        state: Any = None,
    ) -> Any:
        """Return what a checkpoint holds.

        Args:
            path: a file, or a URL.
            map_location, weights_only: as `torch.load`.
            state: not used; Lightning passes it to plugins that load in place.

        Raises:
            FileNotFoundError: it does not exist.
            CorruptCheckpointError: it is damaged (`verify`).
            Exception: those of `torch.load`.
        """
        local = local_path(path)
        if local is None:
            stock = self._lightnings_own()
            return stock.load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        if not os.path.exists(local):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        chosen = {} if self._verify is None else {"verify_on_load": self._verify}
        with options(**chosen):
            return load(local, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, a file or a folder, if it exists.

        Raises:
            OSError: it cannot be removed.
        """
        local = local_path(path)
        if local is None:
            self._lightnings_own().remove_checkpoint(path)
        else:
            _remove(local)

    def teardown(self) -> None:
        """Do nothing: every save has ended."""

    def _write(self, checkpoint: dict[str, Any], local: str) -> None:
        write(
            checkpoint,
            local,
            prefix=_PREFIX,
            otherwise=lambda: self._write_otherwise(checkpoint, local),
        )

    def _write_otherwise(self, checkpoint: dict[str, Any], local: str) -> None:
        """Let Lightning write a checkpoint; but it would replace a device by a file."""
        if is_node(local):
            with open_node(local) as node:
                torch.save(checkpoint, node)
        else:
            self._lightnings_own().save_checkpoint(checkpoint, local)

    def _lightnings_own(self) -> Any:
        if self._stock is None:
            self._stock = stock_class(_FABRIC, "plugins.io.torch_io", "TorchCheckpointIO")()
        return self._stock


class FastAsyncCheckpointIO(FastCheckpointIO):
    """Saves during training, as Lightning's `AsyncCheckpointIO` does.

    The tensors are copied into host memory before `save_checkpoint` returns, within a budget, and
    never on the device. An error is raised once: by the next save, or by `teardown` at the end of
    `fit`. A checkpoint that a new one replaces (`save_top_k`) is removed only when the new one is
    durable; if that save fails, it stays.
    """

    def __init__(
        self,
        *,
        snapshot_budget: int | None = None,
        verify: bool | None = None,
    ) -> None:
        """Make a plugin.

        Args:
            snapshot_budget: as `save_async`.
            verify: as `FastCheckpointIO`.

        Raises:
            ConfigError: an argument has an impossible value.
        """
        super().__init__(verify=verify)
        check_budget(snapshot_budget)
        self._budget = snapshot_budget
        self._reset()

    def _reset(self) -> None:
        self._saves: list[PendingSave] = []  # whose outcomes no caller has seen
        self._replaced: dict[str, PendingSave] = {}  # files to be removed after a save
        self._removing = threading.RLock()  # a signal handler may save, too
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned process needs, without the pending saves."""
        here = ("_saves", "_replaced", "_removing", "_pid", "_stock")
        return {name: value for name, value in vars(self).items() if name not in here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _stock=None)
        self._reset()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Start a save. At most two are pending; a third waits.

        Raises:
            Exception: an earlier save failed and no caller has seen it; this one is not started.
            TypeError: as `FastCheckpointIO`.
        """
        self._reset_in_child()
        self._raise_failed()
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self,
        path: Path,
        map_location: Any = _in_memory,
        weights_only: bool | None = None,
        *,
        state: Any = None,
    ) -> Any:
        """Return what a checkpoint holds, once the pending saves have ended."""
        self._reset_in_child()
        for save in self._saves:
            save.exception()
        return super().load_checkpoint(path, map_location, weights_only, state=state)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint once the pending saves are in place.

        Raises:
            OSError: it cannot be removed.
        """
        self._reset_in_child()
        local = local_path(path)
        last = self._saves[-1] if self._saves else None
        if local is None or last is None or last.report is not None:
            super().remove_checkpoint(path)
        else:
            self._replaced[local] = last
            last.add_done_callback(partial(self._remove_old, local))

    def _remove_old(self, local: str, save: PendingSave) -> None:
        """Remove what an ended save has replaced; if that save failed, it stays."""
        with self._removing:
            if self._replaced.pop(local, None) is not save or save.report is None:
                return
            try:
                _remove(local)
            except ours(OSError) as error:
                _log.warning("%s: an old checkpoint stays: %s", local, error)

    def teardown(self) -> None:
        """Wait for all saves.

        Raises:
            Exception: a save failed and no caller has seen it. Further errors are logged.
        """
        self._reset_in_child()
        first: BaseException | None = None
        saves, self._saves = self._saves, []
        for save in saves:
            error = save.exception()
            if error is not None and first is not None:
                _log.error("a checkpoint was not saved: %s", error)
            first = first or error
        with self._removing:  # the saving thread may be removing one now
            left = list(self._replaced.items())
        for local, save in left:
            self._remove_old(local, save)
        if first is not None:
            raise first

    def _write(self, checkpoint: dict[str, Any], local: str) -> None:
        with self._removing:
            self._replaced.pop(local, None)  # it was to be removed, and is written again
        try:
            save = start_save(
                checkpoint,
                local,
                self._budget,
                prefix=_PREFIX,
                otherwise=lambda: self._write_otherwise(checkpoint, local),
            )
        except BaseException as error:  # perhaps that of an earlier save to this path
            self._saves = [one for one in self._saves if not _ended_by(one, error)]
            raise
        self._saves.append(save)

    def _reset_in_child(self) -> None:
        """Forget the parent's saves in a forked child."""
        if self._pid != os.getpid():
            self._reset()

    def _raise_failed(self) -> None:
        for save in [one for one in self._saves if one.done()]:
            self._saves.remove(save)
            save.wait()


def _ended_by(save: PendingSave, error: BaseException) -> bool:
    return save.done() and save.exception() is error


def local_path(path: Path) -> str | None:
    """Return the absolute path of a local file; None for another URL."""
    core = importlib.import_module("fsspec.core")
    implementation = importlib.import_module("fsspec.implementations.local")
    file_system, found = core.url_to_fs(str(path))
    return str(found) if type(file_system) is implementation.LocalFileSystem else None


def _remove(local: str) -> None:
    if os.path.isdir(local) and not os.path.islink(local):
        shutil.rmtree(local)
        return
    with suppress(FileNotFoundError):
        os.unlink(local)


def stock_class(homes: tuple[str, str], module: str, name: str) -> Any:
    """Return a class of Lightning, from the package in use.

    Raises:
        ModuleNotFoundError: neither is installed.
    """
    in_use = [home for home in homes if home in sys.modules]
    for home in in_use or homes:
        try:
            return getattr(importlib.import_module(f"{home}.{module}"), name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"no package has {module}.{name}: pip install lightning")


def _acknowledge(module: Any) -> None:
    """Register our classes as plugins: each package of Lightning has a base class."""
    module.CheckpointIO.register(FastCheckpointIO)


for _home in _FABRIC:
    when_imported(f"{_home}.plugins.io.checkpoint_io", _acknowledge)
