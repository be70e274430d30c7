"""How a `Checkpointer` saves and loads: as one process, or as a rank among many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fastserial.overlap.asynchronous import Kind
from fastserial.overlap.pending import PendingSave
from fastserial.training.folder import CheckpointFolder

__all__ = ["OWN", "Way"]

OWN = "checkpointer"  # the key of what is not the user's


class Way(Protocol):
    """What depends on how many processes take part. With several, each method is collective."""

    tends: bool  # whether this process looks after the folder

    def together(self) -> AbstractContextManager[object]:
        """Do what one process alone may do: what it raises, as warnings may, all learn of."""

    def prepare(self, folder: CheckpointFolder) -> None:
        """Make the folder, and keep other processes from saving there.

        Raises:
            ConfigError: another process does.
            OSError: the folder cannot be made.
        """

    def start(
        self,
        objects: Mapping[str, Any],
        own: dict[str, Any],
        path: str,
        kind: Kind,
        budget: int | None,
        then: Callable[[], object],
        began: float,
    ) -> PendingSave:
        """Start to save the state of the objects, and what is the Checkpointer's own.

        Args:
            then: called on the saving thread once the file is in place.
            began: when the user's call did (`perf_counter`).
        """

    def steps(self, folder: CheckpointFolder) -> list[int]:
        """Return the steps of which all processes see a file, the last one first."""

    def read(self, objects: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return what a file holds; with several ranks tensors of the objects are filled by then.

        Raises:
            FileNotFoundError: there is no such file.
            CorruptCheckpointError: it is damaged.
            UnreadableCheckpointError: no Checkpointer wrote it.
            LoadMismatchError: it has the state of other objects.
        """

    def restore(self, objects: Mapping[str, Any], found: dict[str, Any], path: str) -> None:
        """Put what `read` returned into the objects.

        Raises:
            LoadMismatchError: it has the state of other objects.
            Exception: of the user's `load_state_dict`.
        """

    def generators(self, own: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the states of this process's random generators, if there are any."""

    def size_of(self, objects: Mapping[str, Any], own: dict[str, Any], path: str) -> int | None:
        """Return the bytes that the file would have now, None where that is not known.

        Raises:
            Exception: an object cannot be pickled, or would not be loaded again.
        """

    def is_asked(self, mine: bool) -> bool:
        """Tell whether any process was asked for a checkpoint."""
