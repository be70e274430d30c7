"""Hugging Face's Trainer: which of its checkpoints are complete.

    from fastserial.integrations.transformers import CheckpointCallback, resume_from

    trainer = Trainer(..., callbacks=[CheckpointCallback()])
    trainer.train(resume_from_checkpoint=resume_from(args.output_dir))

A checkpoint of the Trainer is a folder of several files. The callback waits until those of all
ranks are durable, and then writes a mark into the folder: a file with their names and sizes.
`resume_from` skips folders whose files differ from the mark. A folder without a mark, which the
Trainer wrote without the callback, is accepted if its files are whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fastserial.checkpoints.verify import checkpoints_in, verify
from fastserial.checkpoints.verify.file_list import MARK, file_lists_in
from fastserial.errors import FastserialError
from fastserial.files.durable import replace_bytes, sync_folders

if TYPE_CHECKING:

    class CallbackBase:
        """transformers may not be there when types are checked."""

else:
    from transformers import TrainerCallback as CallbackBase

__all__ = ["MARK", "CheckpointCallback", "IncompleteCheckpointError", "is_complete", "resume_from"]

_FOLDER = re.compile(r"checkpoint-(\d+)")
_VERSION = 1
_UNFINISHED = json.dumps({"version": _VERSION, "files": None})  # the mark of an unfinished folder
_LAST_WRITTEN = "trainer_state.json"
# `JITCheckpointCallback` has this file in a folder while it writes there.
_SENTINEL = "checkpoint-is-incomplete.txt"
_log = logging.getLogger("fastserial")


class IncompleteCheckpointError(FastserialError, RuntimeError):
    """A rank could not sync its files of a checkpoint, which has no mark."""


class CheckpointCallback(CallbackBase):
    """Marks `checkpoint-N` when all its files are durable.

    It also takes over `save_total_limit`: the Trainer removes old checkpoints before the new one is
    durable; the callback removes them after the mark. Folders without a mark are never removed.
    """

    def __init__(self) -> None:
        self._limit: int | None = None
        self._states: dict[Path, tuple[int, int] | None] = {}
        self._suspended: tuple[Path, str | None] | None = None  # a folder, and its previous mark

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Take over the removal of old checkpoints; record which exist."""
        if args.save_total_limit is not None:
            self._limit, args.save_total_limit = args.save_total_limit, None
        self._states = {one: _version(one) for one in _checkpoints(Path(args.output_dir))}

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mark a folder of an earlier run as unfinished: it may be overwritten now."""
        folder = _folder_of(args, state)
        if folder in self._states and state.is_world_process_zero:
            mark = folder / MARK
            self._suspended = folder, mark.read_text("utf-8") if mark.exists() else None
            replace_bytes(str(mark), _UNFINISHED.encode())

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Restore the mark of a folder that was not overwritten."""
        self._restore_mark()

    def _restore_mark(self) -> None:
        if self._suspended is None:
            return
        (folder, text), self._suspended = self._suspended, None
        if text is not None:
            replace_bytes(str(folder / MARK), text.encode())
        else:
            (folder / MARK).unlink(missing_ok=True)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mark the checkpoint that the Trainer has just written.

        Raises:
            IncompleteCheckpointError: another rank could not sync its files.
            OSError: this rank could not.
        """
        self._complete(args, state, _folder_of(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mark what `JITCheckpointCallback` saved after a signal, without a call of `on_save`."""
        for step in (state.global_step - 1, state.global_step):  # it may come before a step ends
            folder = Path(args.output_dir) / f"checkpoint-{step}"
            if _on_any_rank(state.is_world_process_zero and self._is_new(folder)):
                self._complete(args, state, folder)
        self._restore_mark()
        if self._limit is not None:
            args.save_total_limit, self._limit = self._limit, None

    def _is_new(self, folder: Path) -> bool:
        """Return whether a whole checkpoint without a mark was written since training began."""
        found = _version(folder)
        written = found is not None and found != self._states.get(folder)
        return written and not (folder / _SENTINEL).exists() and not is_complete(folder)

    def _complete(self, args: Any, state: Any, folder: Path) -> None:
        failure: OSError | None = None
        _on_any_rank(False)  # all ranks have written their files
        if folder.is_dir() and int(args.local_process_index) == 0:
            try:
                _sync(folder)
            except OSError as error:
                failure = error
        if _on_any_rank(failure is not None):
            raise failure or IncompleteCheckpointError(f"{folder}: another rank could not sync it")
        if folder.is_dir() and state.is_world_process_zero:
            _mark(folder)
            self._suspended = None
            self._states.pop(folder, None)
            if self._limit is not None and self._limit > 0:
                _remove_old(folder, self._limit, state.best_model_checkpoint)


def resume_from(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete `checkpoint-N` in a folder; None if there is none.

    Pass it to `trainer.train(resume_from_checkpoint=...)`. Incomplete ones are skipped, with a
    warning that names them. One that was written without a `CheckpointCallback` is read (every
    checksum) and accepted if its files are whole, also with a warning: whether all ranks had
    written theirs is unknown.
    """
    passed = []
    found: Path | None = None
    for folder in _checkpoints(Path(output_dir)):
        unmarked = not (folder / MARK).exists()
        if _is_whole(folder) if unmarked else is_complete(folder):
            found = folder
            break
        passed.append(folder.name)
    if passed:
        instead = f"{found.name} is used" if found else "training starts from the beginning"
        text = (
            f"{os.fspath(output_dir)}: {', '.join(passed)}: not complete; {instead}. "
            "To use one nevertheless, give its path to `train(resume_from_checkpoint=...)`"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    if found and unmarked:
        text = (
            f"{found}: it is used although `CheckpointCallback` did not mark it: its files are "
            "whole; whether a file is missing is unknown"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return str(found) if found else None


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint has its mark, and the files and sizes in it."""
    if os.path.exists(os.path.join(folder, _SENTINEL)):
        return False
    files = _marked_files(folder)
    try:
        return files is not None and all(
            os.path.getsize(os.path.join(folder, name)) == size for name, size in files.items()
        )
    except OSError:
        return False


def _marked_files(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the sizes of the files that a mark names (bytes), None if it names none."""
    try:
        with open(os.path.join(folder, MARK), encoding="utf-8") as file:
            files = json.load(file)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if isinstance(files, dict) else None


def _is_whole(folder: Path) -> bool:
    """Return whether the Trainer finished a checkpoint, and all its files are whole."""
    try:
        state = json.loads((folder / _LAST_WRITTEN).read_text("utf-8"))
        whole = folder.name == f"checkpoint-{state['global_step']}"
    except (OSError, ValueError, KeyError, TypeError):
        return False
    names = [*checkpoints_in(folder), *file_lists_in(folder)]
    whole = whole and bool(names) and not (folder / _SENTINEL).exists()
    return whole and all(verify(name).ok for name in names)


def _mark(folder: Path) -> None:
    """Write the mark of a folder whose files are durable.

    Raises:
        WriteError: it cannot be written.
    """
    files = {str(one.relative_to(folder)): one.stat().st_size for one in _files(folder)}
    text = json.dumps({"version": _VERSION, "files": files}, indent=1)
    replace_bytes(str(folder / MARK), text.encode())


def _version(folder: Path) -> tuple[int, int] | None:
    """Return what identifies a version of a checkpoint; None if it is unfinished."""
    try:
        found = os.stat(folder / _LAST_WRITTEN)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _folder_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders of checkpoints, the newest first."""
    if not output_dir.is_dir():
        return []
    found = []
    for one in output_dir.iterdir():
        match = _FOLDER.fullmatch(one.name)
        if match and one.is_dir():
            found.append((int(match[1]), one))
    return [one for _, one in sorted(found, reverse=True)]


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if name != MARK and path.is_file():
                yield path


def _sync(folder: Path) -> None:
    """Sync the files of a folder.

    Raises:
        OSError: the disk failed.
    """
    folders = {str(folder)}
    for path in _files(folder):
        folders.add(str(path.parent))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_folders(folders)


def _remove_old(newest: Path, limit: int, best: str | None) -> None:
    """Remove the oldest marked checkpoints beyond the limit, but not the newest or the best."""
    kept = {newest, Path(best)} if best else {newest}
    there = [one for one in _checkpoints(newest.parent) if _marked_files(one) is not None]
    surplus = len(there) - max(limit, len(kept))
    for folder in reversed(there):
        if surplus <= 0:
            break
        if folder not in kept:
            try:
                (folder / MARK).unlink(missing_ok=True)
                shutil.rmtree(folder)
            except OSError as error:
                _log.warning("%s: an old checkpoint stays: %s", folder, error)
            surplus -= 1


def _on_any_rank(here: bool) -> bool:
    """Return whether a value is true on any rank; all ranks wait for each other."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return here
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    flag = torch.tensor([int(here)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
