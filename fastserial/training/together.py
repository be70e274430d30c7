"""Many ranks: one file a step through `fastserial.distributed`, and the same decisions on all.

The ranks talk about what to do through connections of their own, since those of a save are in use
until it ends.
"""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch

from fastserial.checksums import check_crc, crc32
from fastserial.config import options
from fastserial.distributed.onefile.beside import size_of, start_save
from fastserial.distributed.onefile.loader import load
from fastserial.distributed.ranks.group import Traffic, collective
from fastserial.distributed.sharding.file_index import index_of_file
from fastserial.distributed.state.walk import is_live, is_sharded, leaves
from fastserial.errors import CheckpointFileError, UnreadableCheckpointError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip.records import read_places
from fastserial.interrupts import Descriptors
from fastserial.nests import is_object, rebuilt, walk
from fastserial.overlap.asynchronous import Kind
from fastserial.overlap.pending import PendingSave
from fastserial.training.folder import CheckpointFolder
from fastserial.training.generators import portable
from fastserial.training.loadable import check_loadable, warn_of_refused
from fastserial.training.parts import (
    holds_objects,
    restore,
    state_of,
    states,
    steady,
)
from fastserial.training.way import OWN
from fastserial.training.wrapped import plain

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Together"]

_USE = "checkpointer"
_FSDP_1 = "FullyShardedDataParallel"
_SHOWN = 8  # ranks in an error
_PERIOD = 1.0  # seconds: about so often the ranks ask each other whether a signal came
_log = logging.getLogger("fastserial")


class Together:
    """See `Way`."""

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, merge: Literal["union"] | None
    ) -> None:
        """Connect the ranks. Collective.

        Raises:
            DistributedError: a rank does not come.
        """
        self._group = group
        self._timeout = timeout
        self._merge = merge
        with self._talk() as ranks:
            self._rank, self._count = ranks.rank, ranks.size
        self.tends = self._rank == 0
        self._looked = not self.tends  # values are rank 0's
        self._calls = 0  # of `is_asked`
        self._next = 1
        self._last = (0, perf_counter())

    def together(self) -> AbstractContextManager[object]:
        return self._talk(theirs=True)

    def prepare(self, folder: CheckpointFolder) -> None:
        def decide(_: list[bytes]) -> bytes:
            os.makedirs(folder.path, exist_ok=True)
            folder.lock()
            return b""

        with self._talk() as ranks:
            ranks.consult(b"", decide)
            os.makedirs(folder.path, exist_ok=True)  # a network file system has to look again

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
        with self._talk(theirs=True) as ranks:
            kind = self._gather(own, kind, ranks)
            state = dict(states(objects, _saved))
            if not self._looked:
                self._looked = True
                warn_of_refused(state, path, stacklevel=4)
            state[OWN] = own if ranks.rank == 0 else None
            unchanged = steady(objects)
        return start_save(
            state,
            path,
            kind,
            budget,
            group=self._group,
            timeout=self._timeout,
            merge=self._merge,
            began=began,
            steady=unchanged,
            then=then,
        )

    def _gather(self, own: dict[str, Any], kind: Kind, ranks: Traffic) -> Kind:
        """Put the generators of all ranks into rank 0's file; make sure that all mean one step.

        Returns:
            How they save: from copies if any rank does.
        """
        step = own["step"]

        def decide(messages: list[bytes]) -> bytes:
            told = [pickle.loads(message) for message in messages]
            for rank, (other, _, _) in enumerate(told):
                if other != step:
                    text = f"it saves step {other}, rank 0 step {step}"
                    raise ranks.fail(rank, text)
            own["rng"] = [generators for _, generators, _ in told]
            return b"copy" if any(how == "copy" for _, _, how in told) else b""

        message = pickle.dumps((step, portable(own.pop("rng", None)), kind))
        return "copy" if ranks.consult(message, decide) else "in_place"

    def steps(self, folder: CheckpointFolder) -> list[int]:
        def decide(messages: list[bytes]) -> bytes:
            told = [pickle.loads(message) for message in messages]
            seen: list[set[tuple[int, int]]] = [set(files.items()) for _, files in told]
            common, missed = set.intersection(*seen), set.union(*seen)
            if missed and not common:
                rank, text = _nothing_in_common([path for path, _ in told], seen)
                raise ranks.fail(rank, text)
            missed -= common
            if missed:
                _log.warning(
                    "%s: not all ranks see the same file of step %s; it is passed over",
                    folder.path,
                    ", ".join(str(step) for step in sorted({step for step, _ in missed})),
                )
            return pickle.dumps(sorted((step for step, _ in common), reverse=True))

        with self._talk() as ranks:
            answer = ranks.consult(pickle.dumps((folder.path, folder.sizes())), decide)
        found: list[int] = pickle.loads(answer)
        return found

    def read(self, objects: Mapping[str, Any], path: str) -> dict[str, Any]:
        into: dict[str, Any] = {OWN: None}
        with self._talk() as ranks:
            answer = ranks.consult(b"", lambda _: pickle.dumps(_refusal(path)))
            refusal: Exception | None = pickle.loads(answer)
            if refusal is None:
                into |= {name: _filled(value) for name, value in objects.items()}
        if refusal is not None:
            raise refusal
        with options(verify_on_load=True):
            load(path, into, cast=True, group=self._group, timeout=self._timeout)
        return into

    def restore(self, objects: Mapping[str, Any], found: dict[str, Any], path: str) -> None:
        with self._talk(theirs=True):
            restore(objects, found, path)

    def generators(self, own: Mapping[str, Any]) -> Mapping[str, Any] | None:
        found: Any = own.get("rng")
        there = found if isinstance(found, list) else [found]
        if len(there) != self._count:
            text = (
                f"the checkpoint is of {len(there)} ranks, there are {self._count}: random "
                "numbers will be others than in an unbroken run"
            )
            warnings.warn(text, UserWarning, stacklevel=3)
        return there[self._rank] if self._rank < len(there) else None

    def size_of(self, objects: Mapping[str, Any], own: dict[str, Any], path: str) -> int | None:
        with self._talk() as ranks:
            own["rng"] = [portable(own.pop("rng", None))] * self._count
            state = {**states(objects, _saved), OWN: own if ranks.rank == 0 else None}
            return size_of(state, path, ranks, check_loadable, self._merge)

    def is_asked(self, mine: bool) -> bool:
        """Tell whether any rank was asked; about once a second the ranks really ask each other."""
        self._calls += 1
        if self._calls < self._next:
            return False

        def decide(messages: list[bytes]) -> bytes:
            now, (calls, then) = perf_counter(), self._last
            each = (now - then) / (self._calls - calls)
            self._last = (self._calls, now)
            pause = max(1, int(_PERIOD / max(each, 1e-6))) if self._calls > 1 else 1
            return pickle.dumps((any(message != b"\0" for message in messages), pause))

        with self._talk() as ranks:
            answer = ranks.consult(bytes([mine]), decide)
        asked, pause = pickle.loads(answer)
        self._next = self._calls + pause
        return bool(asked)

    def _talk(self, theirs: bool = False) -> AbstractContextManager[Traffic]:
        return collective(self._group, self._timeout, _USE, theirs=theirs)


def _nothing_in_common(paths: list[str], seen: list[set[tuple[int, int]]]) -> tuple[int, str]:
    """Return which rank is to blame for it that no checkpoint is seen by all, and the error's text.

    Args:
        paths: each rank's folder.
        seen: the steps and bytes of the files in it.
    """
    blamed = min(range(len(seen)), key=lambda rank: len(seen[rank]))
    there = [
        f"rank {rank} sees {f'step {max(files)[0]}' if files else 'none'} in {path}"
        for rank, (path, files) in enumerate(zip(paths, seen, strict=True))
    ]
    shown = "; ".join(there[:_SHOWN]) + ("; ..." if len(there) > _SHOWN else "")
    return blamed, (
        f"the ranks have no checkpoint in common to resume from: {shown}. Mount the same folder on "
        "all nodes; to start anew, move the checkpoints away"
    )


def holds_shards(objects: Mapping[str, Any]) -> bool:
    """Tell whether an object, or a module's parameter, is split among ranks, be it only one."""
    for _, value in walk(objects):
        if isinstance(value, torch.nn.Module):
            if any(type(module).__name__ == _FSDP_1 for module in value.modules()):
                return True
            if any(is_sharded(one) for one in value.parameters()):
                return True
        elif is_sharded(value):
            return True
    return False


def _saved(value: Any) -> Any:
    """Return the state of an object; of modules and optimizers themselves, which know of shards."""
    inner = plain(value)
    return inner if is_live(inner) else state_of(value)


def _filled(value: Any) -> Any:
    """Return what is filled in place; None for what is replaced."""
    if is_object(value):
        inner = plain(value)
        return inner if is_live(inner) else None
    if holds_objects(value):
        return rebuilt(value, _filled)
    held = leaves(value).values
    if isinstance(value, torch.Tensor) or any(is_sharded(leaf) for leaf in held):
        return value
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in held):
        return rebuilt(value, _filled)  # an optimizer may train it, and it names what is trained
    return None


def _refusal(path: str) -> Exception | None:
    """Return why a file cannot be loaded, as rank 0 sees it; bytes of tensors are not looked at."""
    try:
        with Descriptors() as files:
            fd = files.open(path, os.O_RDONLY)
            for record in read_places(DescriptorSource(fd)).records:
                if record.name.startswith("data/") or not record.crc:
                    continue
                found = crc32(os.pread(fd, record.size, record.data_offset))
                check_crc(found, record.crc, path, record.name, record.data_offset)
            index = index_of_file(fd, path)
            if not (isinstance(index.value, Mapping) and OWN in index.value):
                return UnreadableCheckpointError("it has no entry of a Checkpointer's", path=path)
    except (FileNotFoundError, CheckpointFileError) as error:
        return error
    return None
