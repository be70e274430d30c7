"""A `Checkpointer` of one process: `save_async`, and a load that checks before it changes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from fastserial.checkpoints.load import load
from fastserial.checkpoints.verify import verify
from fastserial.config import options
from fastserial.errors import (
    CheckpointFileError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.interrupts import ours
from fastserial.overlap.asynchronous import start_save
from fastserial.overlap.pending import PendingSave
from fastserial.training.folder import OWN, CheckpointFolder
from fastserial.training.objects import (
    NameDifference,
    ResumeRequest,
    difference,
    names_here,
    names_in,
    refused,
    renamed,
    restore,
    state_of,
    states,
)
from fastserial.training.rank_values import packed, row_of


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A checkpoint to be written.

    Attributes:
        objects: the user's state.
        of_rank: returns the values that each rank has of its own, by name.
        own: the Checkpointer's entry in the file.
        path: of the file.
        budget: of the snapshot.
        base: returns the path of an earlier checkpoint, from which what is the same is cloned, or
            None. Only the main process needs it, and calls it where an error of one is one of all.
        then: called on the saving thread once the file is in place.
        began: when the user's call did (`perf_counter`).
    """

    objects: Mapping[str, Any]
    of_rank: Callable[[], Mapping[str, Any]]
    own: dict[str, Any]
    path: str
    budget: int | None = None
    base: Callable[[], str | None] = lambda: None
    then: Callable[[], object] = bool
    began: float = 0.0


class SingleProcess:
    """How a `Checkpointer` saves and loads in one process.

    `ManyRanks` does the same on each rank of a group: there each method is collective.

    Attributes:
        is_main: whether this process manages the folder.
        rank, count: of this process, and of all that save together.
    """

    is_main = True
    rank, count = 0, 1

    def __init__(self, weights_only: bool) -> None:
        self.weights_only = weights_only
        self._warned_of_refused = not weights_only

    def propagate_errors(
        self, call: str = "Checkpointer", users_code: bool = True
    ) -> AbstractContextManager[Any]:
        """Return a context: what its body raises on one rank is raised on all of them.

        Its value has `decide` and `alive`.

        Args:
            call: what all ranks have to be doing.
            users_code: the body may call the user's code, whose errors are raised as they are.
        """
        return nullcontext(self)

    def decide_on_root(self, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """Give the main process the values of all ranks; return what it makes of them, on all."""
        return decision([value])

    def heartbeat(self) -> None:
        """Show other ranks that this one is alive: to be called during long work."""

    def prepare(self, folder: CheckpointFolder) -> None:
        """Create and lock the folder.

        Raises:
            ConfigError: another process saves there.
            OSError: the folder cannot be created.
        """
        with self.propagate_errors("Checkpointer.save", users_code=False) as ranks:
            ranks.decide_on_root(None, lambda _: folder.lock())
            os.makedirs(folder.path, exist_ok=True)  # a network file system has to look again

    def start(self, job: SaveJob) -> PendingSave:
        """Start to save the state of the objects, and the Checkpointer's own entry."""
        with self.propagate_errors(f"Checkpointer.save({job.own['step']})") as ranks:
            state, of_rank = self._state(job, ranks)
            self._warn_of_refused({**state, **of_rank, OWN: None}, job.path)
            base = job.base() if self.is_main else None
        return self._start(state, job, base)

    def _start(self, state: dict[str, Any], job: SaveJob, base: str | None) -> PendingSave:
        return start_save(state, job.path, job.budget, then=job.then, began=job.began, base=base)

    def _state(self, job: SaveJob, ranks: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return the state with the Checkpointer's entry, and this rank's values."""
        state, of_rank = dict(states(job.objects, self._state_of)), job.of_rank()
        state[OWN] = self._own_entry(job, packed(of_rank) if of_rank else b"", ranks)
        return state, of_rank

    @staticmethod
    def _state_of(value: Any) -> Any:
        """Return what is saved of an object."""
        return state_of(value)

    def _own_entry(self, job: SaveJob, data: bytes, ranks: Any) -> dict[str, Any]:
        """Return the Checkpointer's entry.

        Args:
            data: the packed values of this rank; empty if it has none.
        """
        row = {"ranks": row_of(data, len(data)).unsqueeze(0)} if data else {}
        return {**job.own, **row}

    def _warn_of_refused(self, state: Mapping[str, Any], path: str) -> None:
        """Warn at the first save of what `resume` would refuse."""
        if not self._warned_of_refused:
            self._warned_of_refused = True
            if text := refused(state):
                warnings.warn(f"{path}: {text}", UserWarning, stacklevel=4)

    def steps(self, folder: CheckpointFolder) -> list[int]:
        """Return the steps whose files all ranks see, the last one first."""
        return folder.steps()

    def read(self, wanted: ResumeRequest, path: str) -> tuple[dict[str, Any], NameDifference]:
        """Return what a file holds. Of several ranks, this fills the tensors of the objects.

        Raises:
            FileNotFoundError: there is no such file.
            CorruptCheckpointError: it is damaged.
            UnreadableCheckpointError: it was not written by a Checkpointer.
            LoadMismatchError: it holds the state of other objects.
        """
        try:
            with options(verify_on_load=True):  # a file without checksums is taken, too
                found = load(path, map_location="cpu", weights_only=self.weights_only)
        except (FileNotFoundError, PermissionError, CheckpointFileError, MemoryError):
            raise
        except ours(Exception) as error:
            report = verify(path)
            if report.status in ("ok", "unchecked"):  # `weights_only` refuses what is in it
                raise
            reason = report.problems[0].message if report.problems else "; ".join(report.notes)
            kind = CorruptCheckpointError if report.problems else UnreadableCheckpointError
            raise kind(reason, path=path) from error
        if not isinstance(found, dict) or not isinstance(found.get(OWN), dict):
            raise UnreadableCheckpointError("it has no entry of a Checkpointer", path=path)
        own = found.pop(OWN)
        found = renamed(found, wanted.rename) if wanted.rename else found
        here, there = names_here(wanted.objects), names_in(found)
        return {**found, OWN: own}, difference(here, there, wanted.only is None)

    def restore(self, wanted: ResumeRequest, found: dict[str, Any], path: str) -> None:
        """Put what `read` returned into the objects.

        Raises:
            LoadMismatchError: it holds the state of other objects.
            Exception: of the user's `load_state_dict`.
        """
        restore(wanted.state, found, path, wanted.only, wanted.strict)

    def asked(self, mine: int) -> int:
        """Return the flags that any rank has set, such as: a signal asked for a checkpoint."""
        return mine
