"""`fastserial.save`: saving through fastserial for a caller that did not `install()`.

It runs the same code as after `install()`: the patched copies of torch's inner functions.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch

from fastserial.files.destination import StockWay
from fastserial.patching import save_hooks
from fastserial.patching.install import installed, patched
from fastserial.reasons import ASKED, Reason
from fastserial.reports import SAVES, SaveReport
from fastserial.saving.archive import ZipArchive
from fastserial.saving.incremental import Base
from fastserial.saving.writer import FastFileWriter

_UNPATCHED = StockWay(Reason("this torch stays stock", "see `fastserial patches check`"))


def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    zip_container: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
) -> SaveReport | None:
    """Write what `torch.save(obj, path)` would write, byte for byte, without `install()`.

        fastserial.save(model.state_dict(), "model.pt")

    Options are set by `with fastserial.options(...)`.

    Args:
        base: an earlier checkpoint, or the one at `path`. What has the same bytes there is not
            written but cloned from it, where the file system has reflinks (XFS, btrfs). The new
            file is whole without the base. `report.cloned` counts these bytes.
        zip_container: torch's zip format; False is `_use_new_zipfile_serialization=False`.
        pickle_module, pickle_protocol: as `torch.save`.

    Returns:
        What the save did; None if torch had to write the file itself (a torch without a patch, a
        file that cannot be replaced). `fastserial.summary()` says why.

    Raises:
        WriteError: the file cannot be written; the previous one is intact.
    """
    writer = write(
        obj,
        os.fspath(path),
        base=None if base is None else Base(base),
        zip_container=zip_container,
        pickle_module=pickle_module,
        pickle_protocol=pickle_protocol,
    )
    return None if writer is None else writer.report


def write(
    obj: object,
    path: str,
    *,
    base: Base | None = None,
    zip_container: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    prefix: str | None = None,
    otherwise: Callable[[], object] | None = None,
) -> FastFileWriter | None:
    """Write a file as `save` does, and return the closed writer instead of its report.

    Args:
        base: an earlier file, from which what is the same is cloned.
        zip_container: torch's zip format; False is `_use_new_zipfile_serialization=False`.
        prefix: the folder of the records in the archive; by default the file's name. As for
            `save_hooks.zip_writer`.
        otherwise: writes the file where fastserial cannot; by default `torch.save` does, which
            opens the file before it pickles.

    Returns:
        The closed writer, which knows what the save did; None if fastserial could not write the
        file (a torch without a patch, a file that cannot be replaced).

    Raises:
        WriteError: the file cannot be written; the previous one is intact.
    """
    save_with = _save_zip if zip_container else _save_legacy
    writer = save_with(obj, path, base, pickle_module, pickle_protocol, prefix)
    if not isinstance(writer, StockWay):
        return writer
    if not installed():
        SAVES.add_torchs(writer.reason)  # else the patched function that torch calls counts it
    if otherwise is not None:
        otherwise()
    else:
        torch.save(
            obj,
            path,
            pickle_module,
            pickle_protocol,
            _use_new_zipfile_serialization=zip_container,
        )
    return None


def _save_zip(
    obj: object,
    path: str,
    base: Base | None,
    pickle_module: Any,
    protocol: int,
    prefix: str | None,
) -> FastFileWriter | StockWay:
    function = patched("_save")
    if function is None:
        return _UNPATCHED
    found = save_hooks.zip_writer(path, prefix)
    if isinstance(found, StockWay):
        return found
    writer, name, alignment = found
    writer.base = base
    with ZipArchive(writer, name, True, alignment) as archive:
        function(obj, archive, pickle_module, protocol, False)
    return writer


def _save_legacy(
    obj: object, path: str, base: Base | None, pickle_module: Any, protocol: int, _: str | None
) -> FastFileWriter | StockWay:
    function = patched("_legacy_save")
    if function is None:
        return _UNPATCHED
    if torch.serialization._serialization_tls.skip_data:
        return StockWay(Reason("skip_data leaves the storages out", ASKED))
    writer = save_hooks.open_writer(path, "legacy")
    if not isinstance(writer, StockWay):
        writer.base = base
        with writer:
            function(obj, writer, pickle_module, protocol)
    return writer
