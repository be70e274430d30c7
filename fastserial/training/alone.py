"""One process: `save_async`, and a load that checks everything before it changes anything."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from fastserial.checkpoints.load import load
from fastserial.checkpoints.verify import verify
from fastserial.errors import (
    CheckpointFileError,
    ConfigError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.overlap.asynchronous import Kind, size_of, start_save
from fastserial.overlap.pending import PendingSave
from fastserial.training.folder import CheckpointFolder
from fastserial.training.loadable import refused
from fastserial.training.of_rank import packed, row_of
from fastserial.training.partial import (
    Difference,
    Request,
    difference,
    names_here,
    names_in,
    renamed,
)
from fastserial.training.parts import restore, state_of, states, steady

__all__ = ["OWN", "Alone", "Job"]

OWN = "checkpointer"  # the key of what is not the user's


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint to be written.

    Attributes:
        objects: the user's state.
        of_rank: returns what this rank has for itself: values by name.
        own: the Checkpointer's entry in the file.
        path: of the file.
        kind, budget: of the snapshot.
        then: called on the saving thread once the file is in place.
        began: when the user's call did (`perf_counter`).
    """

    objects: Mapping[str, Any]
    of_rank: Callable[[], Mapping[str, Any]]
    own: dict[str, Any]
    path: str
    kind: Kind = "copy"
    budget: int | None = None
    then: Callable[[], object] = bool
    began: float = 0.0


class Alone:
    """How a `Checkpointer` saves and loads, as one process.

    Of several ranks (`Together`) each makes the same calls: each method is collective.

    Attributes:
        tends: whether this process looks after the folder.
        rank, count: of this process, and of all that save together.
    """

    tends = True
    rank, count = 0, 1

    def __init__(self, weights_only: bool) -> None:
        self.weights_only = weights_only
        self._looked = not weights_only

    def together(self) -> AbstractContextManager[object]:
        """Do what one process alone may do: what it raises, as warnings may, all learn of."""
        return nullcontext()

    def prepare(self, folder: CheckpointFolder) -> None:
        """Make the folder, and keep other processes from saving there.

        Raises:
            ConfigError: another process does.
            OSError: the folder cannot be made.
        """
        os.makedirs(folder.path, exist_ok=True)
        folder.lock()

    def start(self, job: Job) -> PendingSave:
        """Start to save the state of the objects, and what is the Checkpointer's own."""
        state, of_rank = dict(states(job.objects, state_of)), job.of_rank()
        self._warn_of_refused({**state, **of_rank}, job.path)
        state[OWN] = _own(job.own, of_rank)
        return start_save(
            state,
            job.path,
            job.kind,
            job.budget,
            steady=steady(job.objects),
            then=job.then,
            began=job.began,
        )

    def _warn_of_refused(self, state: Mapping[str, Any], path: str) -> None:
        """Warn at the first save of what `resume` would refuse."""
        if not self._looked:
            self._looked = True
            if text := refused(state):
                warnings.warn(f"{path}: {text}", UserWarning, stacklevel=4)

    def size_of(self, job: Job) -> int | None:
        """Return the bytes that a file would have now, None where that is not known.

        Raises:
            ConfigError: `resume` would refuse it.
            Exception: an object cannot be pickled.
        """
        state, of_rank = states(job.objects, state_of), job.of_rank()
        nbytes = size_of({**state, OWN: _own(job.own, of_rank)}, job.path)
        if self.weights_only and (text := refused({**state, **of_rank})):
            raise ConfigError(text)
        return nbytes

    def steps(self, folder: CheckpointFolder) -> list[int]:
        """Return the steps of which all processes see a file, the last one first."""
        return folder.steps()

    def read(self, wanted: Request, path: str) -> tuple[dict[str, Any], Difference]:
        """Return what a file holds; with several ranks tensors of the objects are filled by then.

        Raises:
            FileNotFoundError: there is no such file.
            CorruptCheckpointError: it is damaged.
            UnreadableCheckpointError: no Checkpointer wrote it.
            LoadMismatchError: it has the state of other objects.
        """
        try:
            found = load(path, map_location="cpu", weights_only=self.weights_only, verify=True)
        except (FileNotFoundError, PermissionError, CheckpointFileError, MemoryError):
            raise
        except Exception as error:
            report = verify(path)
            if report.ok:  # torch refuses what is in it
                raise
            reason = report.problems[0].message if report.problems else "; ".join(report.notes)
            kind = CorruptCheckpointError if report.problems else UnreadableCheckpointError
            raise kind(reason, path=path) from error
        if not isinstance(found, dict) or not isinstance(found.get(OWN), dict):
            raise UnreadableCheckpointError("it has no entry of a Checkpointer's", path=path)
        own = found.pop(OWN)
        found = renamed(found, wanted.rename) if wanted.rename else found
        here, there = names_here(wanted.objects), names_in(found)
        return {**found, OWN: own}, difference(here, there, wanted.only is None)

    def restore(self, wanted: Request, found: dict[str, Any], path: str) -> None:
        """Put what `read` returned into the objects.

        Raises:
            LoadMismatchError: it has the state of other objects.
            Exception: of the user's `load_state_dict`.
        """
        restore(wanted.state, found, path, wanted.only, wanted.strict)

    def asked(self, mine: int) -> int:
        """Return the flags that any process has set: it was asked for a checkpoint, say."""
        return mine


def _own(own: dict[str, Any], of_rank: Mapping[str, Any]) -> dict[str, Any]:
    if not of_rank:
        return own
    data = packed(of_rank)
    return {**own, "ranks": row_of(data, len(data)).unsqueeze(0)}
