"""A folder of checkpoints, one file for each step: its lock, and which of them are kept."""

from __future__ import annotations

import fcntl
import gc
import logging
import math
import os
import re
import string
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastserial.config import current
from fastserial.errors import (
    CheckpointFileError,
    ConfigError,
    CorruptCheckpointError,
    FastserialError,
    RemoteError,
)
from fastserial.files import temporary
from fastserial.files.durable import make_folder
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_directory
from fastserial.interrupts import Descriptors, ours, suppress

if TYPE_CHECKING:
    from fastserial.training.mirror import Mirror


Best = tuple[str, Literal["min", "max"]]

OWN = "checkpointer"  # the key of what is not the user's
_LOCK = ".fastserial.lock"
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_log = logging.getLogger("fastserial")


def seconds_of(name: str, value: object) -> float:
    """Return the seconds of a time such as "90s", "10min", "1.5h" or "2d".

    Args:
        name: of the argument, for the error.

    Raises:
        ConfigError: it is not such a time, or is zero.
    """
    found = _TEXT.fullmatch(value) if isinstance(value, str) else None
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not seconds:
        raise ConfigError(f'{name} must be a time such as "90s", "10min", "2h" or "7d": {value!r}')
    return seconds


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules for the checkpoints to keep; one rule that applies is enough.

    Attributes:
        last: the number of newest ones; at least one.
        every: those whose step is a multiple.
        best: the one with the least or greatest value of a metric.
        seconds: those that are not older.
    """

    last: int
    every: int | None = None
    best: Best | None = None
    seconds: float | None = None

    def surplus(
        self,
        steps: Sequence[int],
        stale: Collection[int],
        age: Callable[[int], float],
        value: Callable[[int], float | None],
    ) -> list[int]:
        """Return the steps that may be removed.

        Args:
            steps: of the whole checkpoints, the newest first.
            stale: those among them that another run left: only `last` keeps them.
            age: returns the age of a step's file (seconds).
            value: returns a step's value of the metric; None if it has none.
        """
        mine = [step for step in steps if step not in stale]
        kept = set(sorted(steps, key=lambda step: step in stale)[: max(1, self.last)])
        if self.every is not None:
            kept.update(step for step in mine if step % self.every == 0)
        if self.seconds is not None:
            kept.update(step for step in mine if age(step) <= self.seconds)
        if self.best is not None:
            sign = 1 if self.best[1] == "min" else -1
            values = [(found, step) for step in mine if (found := value(step)) is not None]
            ranked = [(sign * found, -step) for found, step in values if not math.isnan(found)]
            kept.update(-step for _, step in sorted(ranked)[:1])
        return [step for step in steps if step not in kept]


class CheckpointFolder:
    """Files such as `step-00000100.pt` in a folder. Other files there are ignored."""

    def __init__(self, path: str, name: str) -> None:
        """Name the files.

        Args:
            path: of the folder.
            name: of a file, with `{step}` for the step, as in `str.format`.

        Raises:
            ConfigError: the name does not distinguish steps.
        """
        self.path = path
        self._name = name
        self._pattern = _pattern(name)
        self._locked_path = ""  # in `_holders`
        self._lock: weakref.finalize[Any, CheckpointFolder] | None = None

    def lock(self) -> None:
        """Create the folder, and keep others from saving here until `unlock`.

        The lock ends with this process, too, and is not inherited by a forked child. On a file
        system without locks it has no effect on other processes.

        Raises:
            ConfigError: another process, or another object of this process, saves here.
            OSError: the folder cannot be created.
        """
        make_folder(self.path, current().durable)
        path = os.path.realpath(self.path)
        holder = _holders.get(path)
        if holder is self:
            return
        if holder is not None:
            del holder
            gc.collect()  # it may be unreachable
        if path in _holders:
            raise _in_use(path, "another Checkpointer of this process", "call its `close()`")
        self.unlock()  # of what a symlink pointed to before
        fd = _open_lock(path)
        _holders[path] = self
        self._locked_path = path
        if fd is not None:
            self._lock = weakref.finalize(self, _close_lock, fd)

    def unlock(self) -> None:
        """End `lock`. Idempotent."""
        if _holders.get(self._locked_path) is self:
            del _holders[self._locked_path]
        if self._lock is not None:
            self._lock()

    def file(self, step: int) -> str:
        """Return the path of a step's checkpoint, whether it exists or not."""
        return os.path.join(self.path, self.name(step))

    def name(self, step: int) -> str:
        """Return the name of a step's checkpoint in the folder."""
        return self._name.format(step=step)

    def step_of(self, name: str) -> int | None:
        """Return the step in the name of a file; None if it is another file."""
        match = self._pattern.fullmatch(name)
        step = int(match[1]) if match else None
        return step if step is not None and self.name(step) == name else None

    def steps(self) -> list[int]:
        """Return the steps that have a file, the last one first.

        Raises:
            OSError: the folder cannot be read.
        """
        found = [
            step
            for entry in self._entries()
            if (step := self.step_of(entry.name)) is not None and entry.is_file()
        ]
        return sorted(found, reverse=True)

    def written_at(self, step: int) -> float | None:
        """Return when a step's file was written (`time.time`); None if it no longer exists."""
        try:
            return os.stat(self.file(step)).st_mtime
        except ours(OSError):
            return None

    def sizes(self) -> dict[int, int]:
        """Return the sizes of the files by their steps (bytes).

        Raises:
            OSError: the folder cannot be read.
        """
        found = {}
        for step in self.steps():
            with suppress(OSError):  # it no longer exists
                found[step] = os.path.getsize(self.file(step))
        return found

    def is_complete(self, step: int) -> bool:
        """Return whether a file is not truncated: the directory of the archive is at its end."""
        try:
            fd = os.open(self.file(step), os.O_RDONLY | os.O_CLOEXEC)
        except ours(OSError):
            return False
        try:
            read_directory(DescriptorSource(fd), headers=False)
        except ours(OSError, CheckpointFileError):
            return False
        finally:
            os.close(fd)
        return True

    def remove(self, steps: Iterable[int]) -> None:
        """Remove checkpoints; of a symbolic link only the link.

        Raises:
            OSError: a file cannot be removed.
        """
        for step in steps:
            with suppress(FileNotFoundError):
                os.unlink(self.file(step))

    def sweep(self) -> None:
        """Remove what killed saves left."""
        with suppress(OSError), Descriptors() as files:
            temporary.sweep(files.open(self.path, os.O_RDONLY | os.O_DIRECTORY))

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                yield from entries
        except ours(FileNotFoundError):
            return


def _pattern(name: str) -> re.Pattern[str]:
    """Return a pattern that finds the step in the names of files."""
    try:
        parts = list(string.Formatter().parse(name))
        fields = [field for _, field, _, _ in parts if field is not None]
        is_usual = fields == ["step"] and os.path.basename(name) == name and name.format(step=7)
    except ours(ValueError, KeyError, IndexError):
        is_usual = False
    if not is_usual or is_usual == name.format(step=8):
        raise ConfigError(
            'name must be that of a file with one {step} in it, such as "step-{step:08d}.pt", '
            f"not {name!r}"
        )
    digits = {None: "", "step": r"(\d+)"}
    return re.compile("".join(re.escape(text) + digits[field] for text, field, _, _ in parts))


# The folders that are locked by this process, by their real paths.
_holders: weakref.WeakValueDictionary[str, CheckpointFolder] = weakref.WeakValueDictionary()


def _open_lock(folder: str) -> int | None:
    """Return the lock file's descriptor, locked; None where files cannot be locked.

    The file is never removed here: another process may have just opened it.

    Raises:
        ConfigError: it is locked.
    """
    path = os.path.join(folder, _LOCK)
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except ours(OSError):
        try:
            fd = os.open(path, os.O_RDONLY | flags)  # it belongs to another user
        except ours(OSError):
            return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ours(BlockingIOError):
        owner = b""
        with suppress(OSError):
            owner = os.pread(fd, 300, 0)
        _close_lock(fd)
        named = f"process {owner.decode(errors='replace')}" if owner else "another process"
        remedy, host = "end that process", named.partition(" on ")[2]
        if host != os.uname().nodename:  # NFS 3 may keep the locks of a host that crashed
            remedy += f". If its host is gone and its lock has stayed, remove {path}"
        raise _in_use(folder, named, remedy) from None
    except ours(OSError):
        _close_lock(fd)
        return None
    with suppress(OSError):  # it only names the owner
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} on {os.uname().nodename}".encode(), 0)
    return fd


def _close_lock(fd: int) -> None:
    """Close the lock file. NFS reports only now that the owner's name could not be written."""
    with suppress(OSError):
        os.close(fd)


def _in_use(folder: str, owner: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{folder}: {owner} saves checkpoints in this folder, and each would remove the other's. "
        f"Give each run its own folder, or {remedy}"
    )


def _leave_to_parent() -> None:
    """Close the locks in a forked child: it would keep them when the parent has crashed."""
    for folder in list(_holders.values()):
        folder.unlock()


os.register_at_fork(after_in_child=_leave_to_parent)


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
            except ours(Exception):
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
        except ours(OSError) as error:
            _log.warning("an old checkpoint in %s stays: %s", self.folder.path, error)

    def _value_of(self, step: int) -> float | None:
        """Return the metric's value of a checkpoint, which an earlier process may have written."""
        if step not in self._values:
            path = self.folder.file(step)
            self._values[step] = None
            try:
                self._values[step] = _own_entry(path).get("metrics", {}).get(self._metric)
            except ours(OSError, FastserialError) as error:
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

    def get_ready(self, step: int | None, alive: Callable[[], object]) -> None:
        """Prepare the folder for `resume`: no leftovers, and what only the mirror has.

        Args:
            step: that is wanted; None: the newest one.
            alive: called about once a second during a download.

        Raises:
            RemoteError, WriteError: as `fetch_newest` and `fetch`.
        """
        self.folder.sweep()
        self.warn_of_missing_folder()
        if step is None:
            self.fetch_newest(alive)
        elif not os.path.exists(self.folder.file(step)):
            self.fetch(step, alive)

    def fetch_newest(self, alive: Callable[[], object], tried: Collection[int] = ()) -> None:
        """Download from the mirror its newest whole checkpoint, if the folder has none as new.

        Args:
            alive: called about once a second during a download.
            tried: steps that are known to be damaged.

        Raises:
            RemoteError: the mirror fails, and the folder has no other checkpoint.
            WriteError: the file cannot be written.
        """
        if self.mirror is None:
            return
        here = self._newest(tried)
        try:
            there = self.mirror.steps(alive)
        except ours(RemoteError) as error:
            if here is None:
                raise
            warnings.warn(f"the mirror is not used: {error}", RuntimeWarning, stacklevel=8)
            return
        for step in there:
            if here is not None and step <= here:
                return
            if step not in tried and self.fetch(step, alive):
                return

    def fetch(self, step: int, alive: Callable[[], object]) -> bool:
        """Download a step's checkpoint from the mirror; return whether the mirror has it whole.

        Args:
            alive: called about once a second.

        Raises:
            RemoteError: the mirror fails.
            WriteError: the file cannot be written.
        """
        try:
            if self.mirror is not None:
                self.mirror.fetch(step, alive)
                return True
        except ours(FileNotFoundError):
            pass
        except ours(CorruptCheckpointError) as error:
            warnings.warn(f"a copy in the mirror is damaged: {error}", RuntimeWarning, stacklevel=9)
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
        warnings.warn(text, UserWarning, stacklevel=7)

    def warn_of_missing_folder(self) -> None:
        """Warn if the parent folder does not exist either: its file system may not be mounted."""
        path = self.folder.path
        if not os.path.isdir(os.path.dirname(path)):
            text = (
                f"{path} does not exist, nor does its parent folder: there is nothing to resume "
                "from. Check the path, and whether its file system is mounted"
            )
            warnings.warn(text, UserWarning, stacklevel=8)


def _own_entry(path: str) -> Mapping[str, Any]:
    """Return a Checkpointer's own entry in a file; no tensor's bytes are read."""
    from fastserial.distributed.layout.file_index import index_of_file  # with torch.distributed

    with open(path, "rb") as file:
        value = index_of_file(file.fileno(), path).value
    found = value.get(OWN) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}
