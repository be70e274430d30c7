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
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fastserial.checksums import crc32
from fastserial.config import options
from fastserial.distributed.beside import size_of, start_save
from fastserial.distributed.file_index import index_of_file
from fastserial.distributed.group import Traffic, traffic_of
from fastserial.distributed.loader import load
from fastserial.distributed.saver import Saving
from fastserial.distributed.walk import is_live, is_sharded, leaves
from fastserial.errors import ConfigError, CorruptCheckpointError
from fastserial.formats.zip.records import read_places
from fastserial.interrupts import Descriptors
from fastserial.overlap.asynchronous import Kind
from fastserial.overlap.pending import PendingSave
from fastserial.training.folder import CheckpointFolder
from fastserial.training.generators import portable
from fastserial.training.loadable import check_loadable
from fastserial.training.parts import plain, put, state_of, steady
from fastserial.training.way import OWN

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

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        """Connect the ranks. Collective.

        Raises:
            DistributedError: a rank does not come.
        """
        self._group = group
        self._timeout = timeout
        traffic = self._talk()
        self._rank, self._count = traffic.rank, traffic.size
        self.tends = traffic.rank == 0
        self._calls = 0  # of `is_asked`
        self._next = 1
        self._last = (0, perf_counter())

    def prepare(self, folder: CheckpointFolder) -> None:
        traffic = self._talk()

        def decide(_: list[bytes]) -> bytes:
            os.makedirs(folder.path, exist_ok=True)
            try:
                folder.lock()
            except ConfigError as error:
                return pickle.dumps(error)
            return pickle.dumps(None)

        with traffic.together():
            refusal: Exception | None = pickle.loads(traffic.consult(b"", decide))
            os.makedirs(folder.path, exist_ok=True)  # a network file system has to look again
        if refusal is not None:
            raise refusal

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
        traffic = traffic_of(self._group, self._timeout)
        kind = self._gather(own, kind)
        state = {**_saved(objects), OWN: own if traffic.rank == 0 else None}
        saving = Saving(traffic, path, "all", None, began)
        return start_save(
            state, saving, traffic, kind, budget, began=began, steady=steady(objects), then=then
        )

    def _gather(self, own: dict[str, Any], kind: Kind) -> Kind:
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
                    raise traffic.fail(rank, text)
            own["rng"] = [generators for _, generators, _ in told]
            return b"copy" if any(how == "copy" for _, _, how in told) else b""

        traffic = self._talk()
        with traffic.together():
            message = pickle.dumps((step, portable(own.pop("rng", None)), kind))
            return "copy" if traffic.consult(message, decide) else "in_place"

    def steps(self, folder: CheckpointFolder) -> list[int]:
        traffic = self._talk()

        def decide(messages: list[bytes]) -> bytes:
            told = [pickle.loads(message) for message in messages]
            seen: list[set[tuple[int, int]]] = [set(files.items()) for _, files in told]
            common, missed = set.intersection(*seen), set.union(*seen)
            if missed and not common:
                rank, text = _nothing_in_common([path for path, _ in told], seen)
                raise traffic.fail(rank, text)
            missed -= common
            if missed:
                _log.warning(
                    "%s: not all ranks see the same file of step %s; it is passed over",
                    folder.path,
                    ", ".join(str(step) for step in sorted({step for step, _ in missed})),
                )
            return pickle.dumps(sorted((step for step, _ in common), reverse=True))

        with traffic.together():
            answer = traffic.consult(pickle.dumps((folder.path, folder.sizes())), decide)
        found: list[int] = pickle.loads(answer)
        return found

    def resume(self, objects: Mapping[str, Any], path: str) -> dict[str, Any]:
        traffic = self._talk()
        with traffic.together():
            answer = traffic.consult(b"", lambda _: pickle.dumps(_refusal(path)))
        refusal: Exception | None = pickle.loads(answer)
        if refusal is not None:
            raise refusal
        into = {**_filled(objects), OWN: None}
        with options(verify_on_load=True):
            load(path, into, group=self._group, timeout=self._timeout)
        own: Any = into.pop(OWN)
        for name, value in objects.items():
            if not is_live(plain(value)):
                put(objects, name, into[name], path)
        return dict(own)

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
        traffic = self._talk()
        own["rng"] = [portable(own.pop("rng", None))] * self._count
        state = {**_saved(objects), OWN: own if traffic.rank == 0 else None}
        with traffic.together():
            return size_of(state, path, traffic, check_loadable)

    def is_asked(self, mine: bool) -> bool:
        """Tell whether any rank was asked; about once a second the ranks really ask each other."""
        self._calls += 1
        if self._calls < self._next:
            return False
        traffic = self._talk()

        def decide(messages: list[bytes]) -> bytes:
            now, (calls, then) = perf_counter(), self._last
            each = (now - then) / (self._calls - calls)
            self._last = (self._calls, now)
            pause = max(1, int(_PERIOD / max(each, 1e-6))) if self._calls > 1 else 1
            return pickle.dumps((any(message != b"\0" for message in messages), pause))

        with traffic.together():
            answer = traffic.consult(bytes([mine]), decide)
        asked, pause = pickle.loads(answer)
        self._next = self._calls + pause
        return bool(asked)

    def _talk(self) -> Traffic:
        return traffic_of(self._group, self._timeout, _USE)


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
    for value in objects.values():
        held = value.modules() if isinstance(value, torch.nn.Module) else ()
        parameters = value.parameters() if isinstance(value, torch.nn.Module) else ()
        if any(type(module).__name__ == _FSDP_1 for module in held):
            return True
        if any(is_sharded(one) for one in parameters):
            return True
        if any(is_sharded(leaf) for leaf in leaves(value).values):
            return True
    return False


def _saved(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is saved: modules and optimizers, which know of shards, and other states."""
    return {
        name: plain(value) if is_live(plain(value)) else state_of(value)
        for name, value in objects.items()
    }


def _filled(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is filled in place; None for what is replaced."""
    found: dict[str, Any] = {}
    for name, value in objects.items():
        sharded = any(is_sharded(leaf) for leaf in leaves(value).values)
        in_place = is_live(plain(value)) or isinstance(value, torch.Tensor) or sharded
        found[name] = plain(value) if in_place else None
    return found


def _refusal(path: str) -> Exception | None:
    """Return why a file cannot be loaded, as rank 0 sees it; bytes of tensors are not looked at."""
    try:
        with Descriptors() as files:
            fd = files.open(path, os.O_RDONLY)
            for record in read_places(fd, os.fstat(fd).st_size).records:
                if record.name.startswith("data/") or not record.crc:
                    continue
                found = crc32(os.pread(fd, record.size, record.data_offset))
                if found != record.crc:
                    return CorruptCheckpointError(f"record {record.name} is damaged", path=path)
            if index_of_file(fd, path).container != "zip":
                return CorruptCheckpointError("no checkpoint that a Checkpointer wrote", path=path)
    except (FileNotFoundError, CorruptCheckpointError) as error:
        return error
    return None
