"""`save_async`: pickled at the call, written by another thread.

torch pickles in the calling thread, so everything except the storages' bytes is fixed at the call.
The layout says where in the file each storage is written.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fastserial.checkpoints.save import write
from fastserial.errors import ConfigError, FastserialError
from fastserial.files.destination import StockWay
from fastserial.formats.zip_layout import ZipPlan
from fastserial.memory.held_settings import quick_switches
from fastserial.memory.storages import Batch, batch_of
from fastserial.overlap import pending
from fastserial.overlap.pending import PendingSave
from fastserial.overlap.snapshot import Snapshot, StoragePart
from fastserial.patching import save_hooks
from fastserial.patching.install import patched
from fastserial.reports import SaveReport, SnapshotReport, publish_save
from fastserial.saving.archive import ZipArchive
from fastserial.saving.incremental import Base
from fastserial.saving.writer import FastFileWriter

if TYPE_CHECKING:
    from torch import UntypedStorage


_log = logging.getLogger("fastserial")


def save_async(
    obj: object,
    path: str | os.PathLike[str],
    *,
    snapshot_budget: int | None = None,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
) -> PendingSave:
    """Save as `torch.save(obj, path)` does, and return before the file is written.

        saving = fastserial.save_async(state, "ckpt.pt")
        optimizer.step()  # the file holds the state of the call
        print(saving.wait())

    The file becomes what `torch.save` would have written at the call, or stays as it was: tensors
    are copied, and may be changed as soon as the call returns. A save to a target waits for the one
    before it; at most two are pending.

    Args:
        obj: what to save. It is pickled at the call.
        path: the file. Where none can be replaced, the save is made before the call returns.
        snapshot_budget: bytes that copies of the tensors may take, of all saves together; by
            default half of the memory that is free, divided by the ranks of the node. If the
            tensors do not fit, the file is written before the call returns.
        pickle_module, pickle_protocol, _use_new_zipfile_serialization: as `torch.save`.

    Returns:
        A handle. `wait()` returns the report, or raises the error of the save.

    Raises:
        TypeError: it is no path. `torch.save` writes into file objects.
        WriteError: the target cannot be written.
        Exception: the object cannot be pickled, or the last save to this target failed and no
            caller has seen its error.
    """
    check_budget(snapshot_budget)
    return start_save(
        obj,
        path,
        snapshot_budget,
        zip_container=_use_new_zipfile_serialization,
        pickle_module=pickle_module,
        pickle_protocol=pickle_protocol,
    )


def check_budget(budget: object) -> None:
    """Check the budget of a snapshot.

    Raises:
        ConfigError: it is not a number of bytes.
    """
    if budget is not None and not (isinstance(budget, int) and budget >= 0):
        raise ConfigError(f"snapshot_budget must be a number of bytes, at least 0, not {budget!r}")


def start_save(
    obj: object,
    path: str | os.PathLike[str],
    budget: int | None,
    *,
    zip_container: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    then: Callable[[], object] | None = None,
    began: float | None = None,
    prefix: str | None = None,
    otherwise: Callable[[], object] | None = None,
    base: str | None = None,
) -> PendingSave:
    """Start a save; as `save_async`.

    Args:
        zip_container, pickle_module, pickle_protocol: as `checkpoints.save.write`.
        then: called on the saving thread once the file is in place.
        began: when the user's call did (`perf_counter`).
        prefix: what is put before the records' names in the archive; by default the file's name.
        otherwise: writes the file, before the call returns, where fastserial cannot; by default
            `torch.save` does.
        base: an earlier file, from which what is the same is cloned.
    """
    began = perf_counter() if began is None else began
    torch.serialization._check_dill_version(pickle_module)
    name: Any = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(
            f"save_async saves to a path, not to a {type(name).__name__}: use torch.save for that"
        )
    target = os.path.realpath(name) if "\0" not in name else name
    pending.admit(target)
    found: _AsyncWork | str  # the work for another thread, or why there is none
    if patched("_save") is None:
        found = "this torch stays stock"
    elif not zip_container:
        found = "the legacy container is saved before the call returns"
    else:
        taken, how = Snapshot(budget, began), (pickle_module, pickle_protocol, False)
        with quick_switches():
            found = _prepare(name, obj, taken, prefix, how, base)
    if isinstance(found, str):
        _log.debug("%s: saved before the call returns: %s", name, found)
        write_now = partial(
            write,
            obj,
            name,
            zip_container=zip_container,
            pickle_module=pickle_module,
            pickle_protocol=pickle_protocol,
            prefix=prefix,
            otherwise=otherwise,
        )
        container = "zip" if zip_container else "legacy"
        work = partial(_save_now, write_now, name, container, found, then)
        return pending.run_at_once(name, target, work)
    found.then = then
    del obj
    if found.taken.kind == "copy":
        save = PendingSave(name, target)
        if pending.run_in_background(save, found):
            found.taken.end_call()
            return save
        found.taken.kind = "blocking"
    return pending.run_at_once(name, target, found)


def _prepare(
    path: str,
    obj: object,
    taken: Snapshot,
    prefix: str | None,
    how: tuple[Any, int, bool],
    base: str | None,
) -> _AsyncWork | str:
    """Open the file and lay the object out; or return why torch has to write it.

    Args:
        how: the last arguments of torch's `_save`.
    """
    found = save_hooks.zip_writer(path, prefix)
    if isinstance(found, StockWay):
        return found.reason
    writer, archive, _ = found
    writer.snapshot = taken.report
    writer.base = None if base is None else Base(base)
    try:
        layout = _SnapshotArchive(archive, taken)
        with layout:
            save: Any = patched("_save")
            save(obj, layout, *how)
        return _AsyncWork(writer, layout.lay_out(), taken)
    except BaseException as error:
        writer.fail(error)
        raise


class _SnapshotArchive(ZipArchive):
    """Lays an archive of a snapshot out, and writes nothing."""

    def __init__(self, archive: str, taken: Snapshot) -> None:
        super().__init__(None, archive)
        self._taken = taken

    def write_record(self, name: str, data: str | bytes | int | UntypedStorage, size: int) -> None:
        if not isinstance(data, str | bytes):  # a storage by itself, which is not copied
            self._taken.kind = "blocking"
        super().write_record(name, data, size)

    def _batch(self, storages: Sequence[UntypedStorage]) -> Batch:
        parts = [StoragePart(storage, 0, storage.nbytes()) for storage in storages]
        copies = self._taken.take(parts)
        return super()._batch(storages) if copies is None else batch_of(copies)


@dataclass(slots=True)
class _AsyncWork:
    """Writes what was laid out. Holds nothing of the state but the snapshot."""

    writer: FastFileWriter
    plan: ZipPlan
    taken: Snapshot
    then: Callable[[], object] | None = None

    def __call__(self) -> SaveReport:
        writer = self.writer
        try:
            writer.write_whole(self.plan)
        except BaseException as error:
            writer.fail(error)
            raise
        finally:
            self.taken.end()
        if writer.report is None:
            raise FastserialError(f"{writer.name}: the save has ended without a report")
        if self.then is not None:
            self.then()
        return writer.report


def _save_now(
    write_now: Callable[[], FastFileWriter | None],
    path: str,
    container: str,
    reason: str,
    then: Callable[[], object] | None,
) -> SaveReport:
    """Save as `torch.save` does, before the call returns, and report why."""
    began = perf_counter()
    writer = write_now()
    seconds = perf_counter() - began
    done = (writer.report if writer is not None else None) or SaveReport(
        path=path,
        container=container,
        bytes=os.path.getsize(path) if os.path.isfile(path) else 0,
        seconds=seconds,
        engine="torch",
        direct=False,
        durable=False,
    )
    snapshot = SnapshotReport(kind="blocking", stall=seconds)
    report = replace(done, fallback=done.fallback or reason, snapshot=snapshot)
    publish_save(report, again=True)
    if then is not None:
        then()
    return report
