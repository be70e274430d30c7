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
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fastserial.checkpoints.verify import checkpoints_in, verify
from fastserial.checkpoints.verify.file_list import MARK, file_lists_in
from fastserial.errors import FastserialError
from fastserial.files.durable import replace_bytes, sync_folders
from fastserial.interrupts import Descriptors, ours, suppress

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
_saving = threading.local()  # its `removals` are those of the save that this thread is in


class IncompleteCheckpointError(FastserialError, RuntimeError):
    """A rank could not sync its files of a checkpoint, which has no mark."""


@dataclass(frozen=True, slots=True)
class _PendingMark:
    """A checkpoint that the Trainer has written, and that has no mark yet.

    Attributes:
        folder: where it is.
        removals: calls of the Trainer's own function that removes old checkpoints, still to be
            made.
    """

    folder: Path
    removals: list[Callable[[], object]] = field(default_factory=list)


class CheckpointCallback(CallbackBase):
    """Marks `checkpoint-N` when all its files are durable.

    The Trainer removes old checkpoints (`save_total_limit`) before the new one is durable. With
    this callback it removes the same ones after the mark.
    """

    def __init__(self) -> None:
        self._written: _PendingMark | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Have the Trainer tell the callback where it saves."""
        self._written = None
        _wrap_trainer()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mark the checkpoint that the Trainer has just written; let it remove old ones.

        Raises:
            IncompleteCheckpointError: another rank could not sync its files.
            OSError: this rank could not.
        """
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._complete(args, state, self._written or _PendingMark(folder))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mark what `JITCheckpointCallback` saved after a signal, without a call of `on_save`.

        Raises:
            IncompleteCheckpointError: another rank could not sync its files.
            OSError: this rank could not.
        """
        if _on_any_rank(self._written is not None):
            self._complete(args, state, self._written)

    def _save(self, trainer: Any, trial: Any, save: Callable[[], None]) -> None:
        """Let the Trainer write a checkpoint, and keep back its removal of old ones.

        Args:
            trainer: the Trainer.
            trial: of a hyperparameter search; None without one.
            save: the Trainer's own method.
        """
        folder = Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"
        if trainer.state.is_world_process_zero and (folder / _LAST_WRITTEN).exists():
            _write_mark(folder, _UNFINISHED)  # files of an earlier run are replaced one by one
        _saving.removals = []
        try:
            save()
            self._written = _PendingMark(folder, _saving.removals)
        finally:
            del _saving.removals

    def _complete(self, args: Any, state: Any, written: _PendingMark | None) -> None:
        """Make a checkpoint durable, mark it, and remove old ones.

        Args:
            args: the Trainer's arguments.
            state: the Trainer's state.
            written: the checkpoint; None if only other ranks wrote one.

        Raises:
            IncompleteCheckpointError: another rank could not sync its files.
            OSError: this rank could not.
        """
        self._written = None
        failure: OSError | None = None
        _on_any_rank(False)  # all ranks have written their files
        folder = written.folder if written and written.folder.is_dir() else None
        if folder and int(args.local_process_index) == 0:
            try:
                _sync(folder)
            except ours(OSError) as error:
                failure = error
        if _on_any_rank(failure is not None):
            raise failure or IncompleteCheckpointError(
                f"{folder or args.output_dir}: another rank could not sync its files"
            )
        if folder and state.is_world_process_zero:
            _mark(folder)
        for remove in written.removals if written else ():
            remove()


@cache
def _wrap_trainer() -> None:
    """Wrap two functions of transformers; without a `CheckpointCallback` they do what they did."""
    from transformers import trainer as module

    trainer: Any = module.Trainer
    write = trainer._save_checkpoint

    @wraps(write)
    def save(self: Any, model: Any, trial: Any, *rest: Any, **named: Any) -> None:
        own = partial(write, self, model, trial, *rest, **named)
        callbacks = self.callback_handler.callbacks
        ours = next((one for one in callbacks if isinstance(one, CheckpointCallback)), None)
        if ours is None:
            own()
        else:
            ours._save(self, trial, own)

    trainer._save_checkpoint = save
    # a method in transformers 5.0, a function in later releases
    for owner, name in ((trainer, "_rotate_checkpoints"), (module, "rotate_checkpoints")):
        if hasattr(owner, name):
            setattr(owner, name, _kept_back(getattr(owner, name)))


def _kept_back(remove: Callable[..., object]) -> Callable[..., None]:
    """Return a function that in a save with a `CheckpointCallback` only records its call."""

    @wraps(remove)
    def called(*arguments: Any, **named: Any) -> None:
        call = partial(remove, *arguments, **named)
        removals = getattr(_saving, "removals", None)
        if removals is None:
            call()
        else:
            removals.append(call)

    return called


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
    except ours(OSError):
        return False


def _marked_files(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the sizes of the files that a mark names (bytes), None if it names none."""
    try:
        with open(os.path.join(folder, MARK), encoding="utf-8") as file:
            files = json.load(file)["files"]
    except ours(OSError, ValueError, KeyError, TypeError):
        return None
    return files if isinstance(files, dict) else None


def _is_whole(folder: Path) -> bool:
    """Return whether the Trainer finished a checkpoint, and all its files are whole."""
    try:
        state = json.loads((folder / _LAST_WRITTEN).read_text("utf-8"))
        whole = folder.name == f"checkpoint-{state['global_step']}"
    except ours(OSError, ValueError, KeyError, TypeError):
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
    _write_mark(folder, json.dumps({"version": _VERSION, "files": files}, indent=1))


def _write_mark(folder: Path, text: str) -> None:
    """Write a mark, and keep the folder's time: the Trainer removes the oldest folders first.

    Raises:
        WriteError: it cannot be written.
    """
    times = folder.stat()
    replace_bytes(str(folder / MARK), text.encode())
    with suppress(OSError):  # another user's folder
        os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))


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
        with Descriptors() as opened:
            os.fsync(opened.open(path, os.O_RDONLY))
    sync_folders(folders)


def _on_any_rank(here: bool) -> bool:
    """Return whether a value is true on any rank; all ranks wait for each other."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return here
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    flag = torch.tensor([int(here)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
