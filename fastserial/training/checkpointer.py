"""`Checkpointer`: the one object of a training script that saves, prunes and resumes."""

from __future__ import annotations

import errno
import gc
import logging
import operator
import os
import signal
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from fastserial.errors import (
    REMEDIES,
    CheckpointFileError,
    ConfigError,
    CorruptCheckpointError,
    TornSnapshotError,
    UnreadableCheckpointError,
    WriteError,
    write_error,
)
from fastserial.files import linux
from fastserial.overlap import guard
from fastserial.overlap.asynchronous import KINDS, Kind
from fastserial.overlap.pending import PendingSave
from fastserial.training.alone import Alone
from fastserial.training.folder import CheckpointFolder
from fastserial.training.generators import generator_states, restore_generators
from fastserial.training.parts import expected_bytes, refuse_unrestorable
from fastserial.training.way import OWN, Way

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Checkpointer"]

_log = logging.getLogger("fastserial")
# By process, since a forked child has its parent's, and the real path of the folder.
_live: weakref.WeakValueDictionary[tuple[int, str], Checkpointer] = weakref.WeakValueDictionary()


def _too_small(path: str, keep: int, needed: int, free: int) -> WriteError:
    text = (
        f"{keep + 1} checkpoints need about {needed} bytes, {free} are free. "
        + REMEDIES[errno.ENOSPC]
    )
    found = write_error(errno.ENOSPC, path, text)
    found.bytes_needed, found.bytes_free = needed, free
    return found


def _is_torn(error: BaseException) -> bool:
    """Tell whether tensors changed on this rank; of several, a `DistributedError` tells of it."""
    return any(isinstance(one, TornSnapshotError) for one in (error, error.__cause__))


class Checkpointer:
    """Saves the state of a training run beside it, and finds it again.

    Each checkpoint is one ordinary torch file, `step-00000100.pt`, written whole or not at all.
    `save` copies the tensors, and the file is written while training goes on.

    In a job of several ranks all of them make one, and call the same methods in the same order;
    they write one file together, and agree on what they resume from.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        keep: int = 3,
        every: int | None = None,
        snapshot: Kind = "copy",
        snapshot_budget: int | None = None,
        rng: bool = True,
        weights_only: bool = True,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        merge: Literal["union"] | None = None,
    ) -> None:
        """Connect the ranks; nothing is read or written.

        Args:
            folder: where the files are; the first save makes it. What is not called like one of
                them is left alone. One Checkpointer at a time saves in a folder: close the one
                before.
            state: what is saved, by name: objects (modules, optimizers, schedulers, whatever has
                `state_dict` and `load_state_dict`), tensors, plain values, and dictionaries, lists
                and tuples of these. `resume` puts states into the objects, values back into this
                mapping and the containers in it, and fills tensors in place. Of several ranks,
                sharded and large tensors are saved as `distributed.save` does; of everything else
                rank 0's.
            keep: how many checkpoints to keep; older ones go once a new one is in place.
            every: save only each so many steps; None: at each call of `save`.
            snapshot, snapshot_budget: as `save_async`. `in_place` reads only what these optimizers
                own where it is, and copies the rest; after a `TornSnapshotError` all is copied.
            rng: save and restore the random generators (Python, torch, NumPy, CUDA), each rank's.
            weights_only: as `torch.load`. Several ranks load no other files.
            group: the ranks that save together; by default all, if torch.distributed is in use.
            timeout: seconds after which a rank that is not heard from counts as lost.
            merge: "union": the ranks hold different keys, as the stages of a pipeline do; see
                `distributed.save`.

        Raises:
            ConfigError: an argument is impossible, a `state_dict()` is given instead of its object,
                a tensor is expanded, or another Checkpointer has the folder.
            DistributedError: a rank does not come.
        """
        _check_whole("keep", keep, 1)
        if every is not None:
            _check_whole("every", every, 1)
        if snapshot not in KINDS:
            raise ConfigError(f'snapshot must be "copy" or "in_place", not {snapshot!r}')
        if snapshot_budget is not None:
            _check_whole("snapshot_budget", snapshot_budget, 0, " of bytes")
        if not isinstance(state, Mapping):
            raise ConfigError(
                "state must be a dictionary of what is saved, by name, such as "
                f'{{"model": model, "optimizer": optimizer}}, not {type(state).__name__}'
            )
        if merge not in (None, "union"):
            raise ConfigError(f'merge must be None or "union", not {merge!r}')
        if OWN in state:
            raise ConfigError(f"the name {OWN!r} in `state` is taken; use another")
        refuse_unrestorable(state)
        self._state = state
        self._keep = keep
        self._every = every
        self._kind = snapshot
        self._budget = snapshot_budget
        self._rng = rng
        self._folder = CheckpointFolder(os.path.abspath(os.fsdecode(folder)))
        self._key = (os.getpid(), os.path.realpath(self._folder.path))
        self._refuse_second()
        self._way = _way(state, group, weights_only, timeout, merge)
        self._processes = _processes()
        self._prepared = 0  # the process that was, once; a forked child has no lock
        self._damaged: set[int] = set()
        self._stale: set[int] = set()  # another run's
        self._last: PendingSave | None = None
        self._handlers: dict[int, Any] = {}
        self._pid = 0  # of the process that the handlers are for
        self._came: set[int] = set()  # signals to this process that are not answered yet
        self._answered = False  # one was, by the last call of `save`
        _live[self._key] = self
        if snapshot == "in_place":
            guard.hold(self)

    def __repr__(self) -> str:
        every = "" if self._every is None else f", every={self._every}"
        names = ", ".join(map(str, self._state))
        return f"<Checkpointer {self._folder.path!r}: {names}; keep={self._keep}{every}>"

    def _refuse_second(self) -> None:
        if self._key in _live:
            gc.collect()  # it may be garbage
        if self._key in _live:
            raise ConfigError(
                f"{self._folder.path}: another Checkpointer of this process has this folder, and "
                "each would remove the other's files. Call its `close()`, or use another folder"
            )

    # -- saving --------------------------------------------------------------------------------

    def save(self, step: int, *, force: bool = False) -> PendingSave | None:
        """Start a checkpoint of this step, or return None if `every` says that it is not its turn.

        Waits for the checkpoint before, if that is still being written. One that a signal asked
        for is made whatever `every` says, and waited for.

        Args:
            step: a whole number, not negative.
            force: save whatever `every` says, as after the last step. The same on all ranks.

        Raises:
            ConfigError: another process saves in this folder.
            Exception: the checkpoint before failed, or this one cannot be started.
        """
        began = perf_counter()
        step = operator.index(step)  # NumPy's and torch's, too: the file holds Python's
        if step < 0:
            raise ConfigError(f"a step must not be negative, not {step}")
        asked = bool(self._handlers) and self._way.is_asked(bool(self._came))
        self._answered = False
        if not (asked or force) and self._every is not None and step % self._every:
            return None
        self.wait()
        if self._prepared != os.getpid():
            self._prepare()
            with self._way.together():
                self._look_for_later(step)
            self._prepared = os.getpid()
        folder, damaged, stale = self._folder, self._damaged, self._stale
        keep, tends = self._keep, self._way.tends

        def written() -> None:
            damaged.discard(step)
            stale.discard(step)
            try:
                if tends:
                    folder.prune(step, keep, damaged, stale)
            except OSError as error:
                _log.warning("an old checkpoint in %s stays: %s", folder.path, error)

        self._last = save = self._way.start(
            self._state,
            self._own(step),
            folder.file(step),
            self._kind,
            self._budget,
            written,
            began,
        )
        if asked:
            self.wait()
            self._came.clear()
            self._answered = True
        return save

    def _prepare(self) -> None:
        if self._processes == 1 < _processes():
            raise ConfigError(
                f"{self._folder.path}: this Checkpointer was made before init_process_group(), so "
                "that each rank would save its own state to the same files. Make it after that"
            )
        if _live.get(self._key) is not self:  # it was closed, and is used again
            self._refuse_second()
            _live[self._key] = self
        self._way.prepare(self._folder)

    def _look_for_later(self, step: int) -> None:
        """Warn of checkpoints that `resume` would take instead of what is saved from now on."""
        later = {found for found in self._folder.steps() if found > step} - self._damaged
        if not self._way.tends or later <= self._stale:
            return
        self._stale |= later
        text = (
            f"{self._folder.path} holds later checkpoints than step {step}'s, up to step "
            f"{max(later)}. They stay, and `resume()` takes the latest: move them away, or use "
            "another folder"
        )
        warnings.warn(text, UserWarning, stacklevel=3)

    def _own(self, step: int) -> dict[str, Any]:
        own: dict[str, Any] = {"version": 1, "step": step}
        if self._rng:
            own["rng"] = generator_states()
        return own

    def wait(self) -> None:
        """Wait until the checkpoint that was started last is in place.

        Raises:
            Exception: it failed.
        """
        last, self._last = self._last, None
        error = last.exception() if last is not None else None
        if error is None:
            return
        if self._kind == "in_place" and _is_torn(error):
            self._kind = "copy"
            guard.unhold(self)
            text = (
                f"{self._folder.path}: tensors were changed while a checkpoint read them in place; "
                'later checkpoints copy them, as with snapshot="copy"'
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        raise error

    def check(self) -> int | None:
        """Try at the start what would go wrong later: saving the state, resuming, room for it.

        Returns:
            About how many bytes a checkpoint has; None where that is not known.

        Raises:
            WriteError: the folder cannot be written, or is too small for `keep` + 1 checkpoints.
            ConfigError: `resume` would refuse what is in the state (`weights_only`), or another
                process saves in this folder.
            OSError: the folder cannot be made.
            Exception: an object cannot be pickled.
        """
        path = self._folder.path
        self._prepare()
        nbytes = self._way.size_of(self._state, self._own(0), self._folder.file(0))
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise write_error(error.errno or errno.EIO, path) from error
        if nbytes is None:
            return None
        nbytes += expected_bytes(self._state)
        there = sum(self._folder.sizes().values())
        needed, free = nbytes * (self._keep + 1), linux.free_bytes(path)
        if needed > free + there:
            raise _too_small(path, self._keep, needed, free)
        return nbytes

    def save_on(self, *signals: int) -> None:
        """Let signals ask for a checkpoint: the next `save` makes it, and waits for it.

        `asked` tells to end the loop after that. A handler that was there is called, too, and
        Ctrl-C interrupts as ever when it comes a second time. Of several ranks it is enough that
        one gets a signal. They all call this, and `save` after each step; about once a second they
        ask each other in it. Call it in the main thread.
        """
        self._pid = os.getpid()
        for number in signals:
            before = signal.signal(number, self._ask)
            self._handlers.setdefault(number, before)

    @property
    def asked(self) -> bool:
        """Whether the last `save` made a checkpoint because a signal asked for it.

        It is in place then, so a loop that ends loses nothing. The same on all ranks, and true
        until the next `save`.
        """
        return self._answered

    def _ask(self, number: int, frame: FrameType | None) -> None:
        before = self._handlers.get(number)
        if os.getpid() != self._pid:  # a forked child has inherited the handler
            _handle(before, number, frame)
            return
        again = number in self._came or self._answered
        self._came.add(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        elif number == signal.SIGINT and again and before != signal.SIG_IGN:
            signal.default_int_handler(number, frame)

    # -- resuming ------------------------------------------------------------------------------

    def resume(self, step: int | None = None) -> int:
        """Put the newest whole checkpoint into the objects, and return its step; 0 if none.

        The newest is that of the highest step. A damaged one is passed over, with a warning that
        names it. A checkpoint of step 0 makes 0, too; `latest` tells whether there is one.

        Args:
            step: take the checkpoint of this step, and no other.

        Raises:
            FileNotFoundError: there is none of that step.
            DistributedError: some ranks see checkpoints, but there is none that all see.
            CorruptCheckpointError: it is damaged, or one is and none is whole.
            UnreadableCheckpointError: no Checkpointer wrote it, or any of them.
            LoadMismatchError: it is a checkpoint of other objects.
            Exception: of the user's own `load_state_dict`, as it is.
        """
        self.wait()
        with self._way.together():
            if self._way.tends:
                self._folder.sweep()
                self._warn_of_links()
        there = self._way.steps(self._folder)
        if step is not None:
            self._restore(step, self._read(step))
            with self._way.together():
                self._look_for_later(step)
            return step
        refused: CheckpointFileError | None = None
        for candidate in there:
            try:
                found = self._read(candidate)
            except FileNotFoundError:
                continue
            except CheckpointFileError as error:
                self._damaged.add(candidate)
                other = isinstance(error, UnreadableCheckpointError)
                refused = error if refused is None or not other else refused
                what = "is no checkpoint of a Checkpointer's" if other else "is damaged"
                text = f"{self._folder.file(candidate)} {what}; the one before is used: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                continue
            self._restore(candidate, found)
            with self._way.together():
                self._warn_of_newer_run(candidate)
            return candidate
        if refused is not None:
            other = isinstance(refused, UnreadableCheckpointError)
            kind = UnreadableCheckpointError if other else CorruptCheckpointError
            raise kind(
                "every checkpoint there is damaged, or is none; move them away to start anew",
                path=self._folder.path,
            )
        return 0

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint that is not cut off; None if there is none."""
        for step in self._folder.steps():
            path = self._folder.file(step)
            if step not in self._damaged and self._folder.is_complete(step):
                return path
        return None

    def _read(self, step: int) -> dict[str, Any]:
        return self._way.read(self._state, self._folder.file(step))

    def _restore(self, step: int, found: dict[str, Any]) -> None:
        own = found.pop(OWN)
        self._way.restore(self._state, found, self._folder.file(step))
        generators = self._way.generators(own) if self._rng else None
        if generators is not None:
            restore_generators(generators)

    def _warn_of_links(self) -> None:
        path = self._folder.path
        for link in self._folder.dangling():
            text = f"{link} is a link that leads to no file; it is passed over"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        if not os.path.isdir(os.path.dirname(path)):
            text = (
                f"{path} does not exist, nor does the folder above it: there is nothing to resume "
                "from. Check the path, and whether its file system is mounted"
            )
            warnings.warn(text, UserWarning, stacklevel=3)

    def _warn_of_newer_run(self, step: int) -> None:
        newer = self._folder.written_later(step) if self._way.tends else ()
        if newer:
            text = (
                f"{self._folder.file(step)} is resumed from, but step {newer[0]} was written after "
                f"it, by another run, it seems: `resume(step={newer[0]})` goes on with that one"
            )
            warnings.warn(text, UserWarning, stacklevel=3)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the last checkpoint, give signal handlers and the folder back. Idempotent.

        Raises:
            Exception: the last checkpoint failed.
        """
        handlers, self._handlers = self._handlers, {}
        for number, before in handlers.items():
            if signal.getsignal(number) == self._ask:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        try:
            self.wait()
        finally:
            guard.unhold(self)
            self._folder.unlock()
            self._prepared = 0
            if _live.get(self._key) is self:
                del _live[self._key]

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as another:
            if error is None:
                raise
            _log.error("the last checkpoint was not saved: %s", another)  # it hides not the first


def _check_whole(name: str, value: object, least: int, unit: str = "") -> None:
    whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    if not whole or operator.index(value) < least:  # type: ignore[arg-type]
        raise ConfigError(f"{name} must be a whole number{unit}, at least {least}, not {value!r}")


def _handle(handler: Any, number: int, frame: FrameType | None) -> None:
    """Do with a signal what a handler, `SIG_IGN` or `SIG_DFL` would."""
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _processes() -> int:
    """Return how many processes there are in the job's process group; without one, 1."""
    import torch.distributed

    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if grouped else 1


def _way(
    state: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    weights_only: bool,
    timeout: float,
    merge: Literal["union"] | None,
) -> Way:
    """Return the way of this process: alone, or as one of the ranks of a group.

    One rank has FSDP's shards, too, and a file that any number of ranks resumes from has none.
    """
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        count = os.environ.get("WORLD_SIZE", "")
        if "RANK" in os.environ and count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"this is one of {count} processes (WORLD_SIZE), and each would save its own state "
                "to the same files: call torch.distributed.init_process_group() before. A process "
                "that is to save alone removes WORLD_SIZE from os.environ"
            )
        return Alone(weights_only)
    alone = torch.distributed.get_world_size(group) == 1
    if alone and not weights_only:
        return Alone(weights_only)
    if not weights_only:
        raise ConfigError("several ranks load with weights_only=True only")
    from fastserial.training.together import Together, holds_shards

    if alone and not holds_shards(state):
        return Alone(weights_only)
    return Together(group, timeout, merge)
