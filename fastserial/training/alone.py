"""One process: `save_async`, and a load that checks everything before it changes anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastserial.checkpoints.load import load
from fastserial.checkpoints.verify import verify
from fastserial.errors import CheckpointFileError, CorruptCheckpointError, UnreadableCheckpointError
from fastserial.overlap.asynchronous import Kind, size_of, start_save
from fastserial.overlap.pending import PendingSave
from fastserial.training.folder import CheckpointFolder
from fastserial.training.loadable import check_loadable, warn_of_refused
from fastserial.training.parts import restore, state_of, states, steady
from fastserial.training.way import OWN

__all__ = ["Alone"]


class Alone:
    """See `Way`."""

    tends = True

    def __init__(self, weights_only: bool) -> None:
        self._weights_only = weights_only
        self._looked = not weights_only

    def together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def prepare(self, folder: CheckpointFolder) -> None:
        os.makedirs(folder.path, exist_ok=True)
        folder.lock()

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
        state = dict(states(objects, state_of))
        if not self._looked:
            self._looked = True
            warn_of_refused(state, path, stacklevel=4)
        state[OWN] = own
        return start_save(state, path, kind, budget, steady=steady(objects), then=then, began=began)

    def steps(self, folder: CheckpointFolder) -> list[int]:
        return folder.steps()

    def read(self, objects: Mapping[str, Any], path: str) -> dict[str, Any]:
        try:
            found = load(path, map_location="cpu", weights_only=self._weights_only, verify=True)
        except (FileNotFoundError, PermissionError, CheckpointFileError, MemoryError):
            raise
        except Exception as error:
            report = verify(path)
            if report.ok:  # torch refuses what is in it
                raise
            reason = report.problems[0].message if report.problems else "; ".join(report.notes)
            kind = CorruptCheckpointError if report.problems else UnreadableCheckpointError
            raise kind(reason, path=path) from error
        if not isinstance(found, dict) or OWN not in found:
            raise UnreadableCheckpointError("it has no entry of a Checkpointer's", path=path)
        return found

    def restore(self, objects: Mapping[str, Any], found: dict[str, Any], path: str) -> None:
        restore(objects, found, path)

    def generators(self, own: Mapping[str, Any]) -> Mapping[str, Any] | None:
        found: Any = own.get("rng")
        mine: Mapping[str, Any] | None = found[0] if isinstance(found, list) else found
        return mine

    def size_of(self, objects: Mapping[str, Any], own: dict[str, Any], path: str) -> int | None:
        look = check_loadable if self._weights_only else len
        return size_of({**states(objects, state_of), OWN: own}, path, look)

    def is_asked(self, mine: bool) -> bool:
        return mine
