"""Manages the folder of a run: which checkpoints are whole, stale, or to be removed."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fastserial.errors import CorruptCheckpointError, FastserialError, RemoteError
from fastserial.training.folder import CheckpointFolder
from fastserial.training.mirror import Mirror
from fastserial.training.retention import Retention
from fastserial.training.single_process import OWN

_log = logging.getLogger("fastserial")


class FolderManager:
    """What is known of the checkpoints in a folder. Saving threads use it, too.

    Attributes:
        folder: where they are.
        mirror: where they are copied to; None without one.
        damaged: steps whose files are damaged, or not a Checkpointer's.
        stale: steps that another run left.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        retention: Retention,
        on_saved: Callable[[int, str], object] | None,
        mirror: Mirror | None = None,
    ) -> None:
        self.folder = folder
        self.mirror = mirror
        self.damaged: set[int] = set()
        self.stale: set[int] = set()
        self._retention = retention
        self._metric = retention.best[0] if retention.best is not None else None
        self._on_saved = on_saved
        self._values: dict[int, float | None] = {}  # the metric's, by step
        self._written: int | None = None  # the step that was written last

    def written(self, step: int, metrics: Mapping[str, float], is_main: bool) -> None:
        """Call `on_saved` for a checkpoint that is in place, and remove old ones.

        Args:
            is_main: this process manages the folder.
        """
        self.damaged.discard(step)
        self.stale.discard(step)
        self._values[step] = None if self._metric is None else metrics.get(self._metric)
        self._written = step
        if not is_main:
            return
        path = self.folder.file(step)
        if self._on_saved is not None:
            try:
                self._on_saved(step, path)
            except Exception:
                _log.exception("%s: on_saved failed", path)
        if self.mirror is not None:
            self.mirror.add(step, metrics, self.prune)
        self.prune()

    def prune(self) -> None:
        """Remove what no rule keeps, except what was just written, or is still to be mirrored.

        Later checkpoints are another run's. They and damaged ones do not count, and are kept.
        """
        newest, now = self._written, time.time()
        if newest is None:
            return

        def age(step: int) -> float:
            written = self.folder.written_at(step)
            return 0.0 if written is None else now - written

        try:
            steps = [one for one in self.folder.steps() if one <= newest]
            steps = [one for one in steps if one not in self.damaged]
            surplus = self._retention.surplus(steps, self.stale, age, self._value_of)
            waiting = () if self.mirror is None else filter(self.mirror.is_waiting, surplus)
            self.folder.remove({*surplus} - {newest, *waiting})
        except OSError as error:
            _log.warning("an old checkpoint in %s stays: %s", self.folder.path, error)

    def _value_of(self, step: int) -> float | None:
        """Return the metric's value of a checkpoint, which an earlier process may have written."""
        if step not in self._values:
            path = self.folder.file(step)
            self._values[step] = None
            try:
                self._values[step] = _own_entry(path).get("metrics", {}).get(self._metric)
            except (OSError, FastserialError) as error:
                _log.warning("%s: its metrics cannot be read: %s", path, error)
        return self._values[step]

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint that is not truncated; None if there is none."""
        step = self._newest(self.damaged)
        return None if step is None else self.folder.file(step)

    def _newest(self, damaged: Collection[int]) -> int | None:
        """Return the newest step whose file is not truncated, nor among the damaged ones."""
        others = (step for step in self.folder.steps() if step not in damaged)
        return next((step for step in others if self.folder.is_complete(step)), None)

    def get_ready(self, step: int | None) -> None:
        """Prepare the folder for `resume`: no leftovers, and what only the mirror has.

        Args:
            step: that is wanted; None: the newest one.

        Raises:
            RemoteError, WriteError: as `fetch_newest` and `fetch`.
        """
        self.folder.sweep()
        self.warn_of_missing_folder()
        if step is None:
            self.fetch_newest()
        elif not os.path.exists(self.folder.file(step)):
            self.fetch(step)

    def fetch_newest(self, tried: Collection[int] = ()) -> None:
        """Download from the mirror its newest whole checkpoint, if the folder has none as new.

        Args:
            tried: steps that are known to be damaged.

        Raises:
            RemoteError: the mirror fails, and the folder has no other checkpoint.
            WriteError: the file cannot be written.
        """
        if self.mirror is None:
            return
        here = self._newest(tried)
        try:
            there = self.mirror.steps()
        except RemoteError as error:
            if here is None:
                raise
            warnings.warn(f"the mirror is not used: {error}", RuntimeWarning, stacklevel=5)
            return
        for step in there:
            if here is not None and step <= here:
                return
            if step not in tried and self.fetch(step):
                return

    def fetch(self, step: int) -> bool:
        """Download a step's checkpoint from the mirror; return whether the mirror has it whole.

        Raises:
            RemoteError: the mirror fails.
            WriteError: the file cannot be written.
        """
        try:
            if self.mirror is not None:
                self.mirror.fetch(step)
                return True
        except FileNotFoundError:
            pass
        except CorruptCheckpointError as error:
            warnings.warn(f"a copy in the mirror is damaged: {error}", RuntimeWarning, stacklevel=5)
        return False

    def warn_of_later(self, step: int) -> None:
        """Warn of checkpoints that `resume` would prefer to those saved from now on."""
        later = {found for found in self.folder.steps() if found > step} - self.damaged
        if later <= self.stale:
            return
        self.stale |= later
        text = (
            f"{self.folder.path} holds later checkpoints than step {step}'s, up to step "
            f"{max(later)}. They stay, and `resume()` takes the latest: move them away, or use "
            "another folder"
        )
        warnings.warn(text, UserWarning, stacklevel=4)

    def warn_of_missing_folder(self) -> None:
        """Warn if the parent folder does not exist either: its file system may not be mounted."""
        path = self.folder.path
        if not os.path.isdir(os.path.dirname(path)):
            text = (
                f"{path} does not exist, nor does its parent folder: there is nothing to resume "
                "from. Check the path, and whether its file system is mounted"
            )
            warnings.warn(text, UserWarning, stacklevel=5)


def _own_entry(path: str) -> Mapping[str, Any]:
    """Return a Checkpointer's own entry in a file; no tensor's bytes are read."""
    from fastserial.distributed.sharding.file_index import index_of_file  # with torch.distributed

    with open(path, "rb") as file:
        value = index_of_file(file.fileno(), path).value
    found = value.get(OWN) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}
