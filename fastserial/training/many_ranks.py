"""A `Checkpointer` of many ranks: one file for each step through `fastserial.distributed`.

All ranks make the same decisions. They exchange messages through connections of their own, since a
save uses its connections until it ends.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch

from fastserial.checksums import check_crc, crc32
from fastserial.config import options
from fastserial.distributed.comm.call import RankCall
from fastserial.distributed.comm.group import RankGroup, collective
from fastserial.distributed.layout.file_index import index_of_file
from fastserial.distributed.layout.flat_shard import FlatShard
from fastserial.distributed.layout.placement import is_sharded
from fastserial.distributed.load.session import load_file
from fastserial.distributed.save.background import start_save
from fastserial.distributed.state.states import has_own_form, state_of_module
from fastserial.distributed.state.walk import is_live, leaves
from fastserial.errors import (
    CheckpointFileError,
    UnreadableCheckpointError,
)
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_places
from fastserial.interrupts import Descriptors, ours
from fastserial.nests import is_object, rebuilt, walk
from fastserial.overlap.pending import PendingSave
from fastserial.training.folder import OWN, CheckpointFolder
from fastserial.training.objects import (
    NameDifference,
    ResumeRequest,
    StateName,
    difference,
    holds_objects,
    lacks_of_rank,
    names_here,
    names_in,
    plain,
    renamed,
    state_of,
    states,
)
from fastserial.training.rank_values import row_of
from fastserial.training.single_process import SaveJob, SingleProcess

if TYPE_CHECKING:
    import torch.distributed as dist


_USE = "checkpointer"
_FSDP_1 = "FullyShardedDataParallel"
_SHOWN = 8  # ranks in an error
_PERIOD = 1.0  # seconds between two exchanges of flags, about
_MAX_PAUSE = 16  # calls between them: an exchange takes some 1 % of 16 steps of 10 ms
_log = logging.getLogger("fastserial")


class ManyRanks(SingleProcess):
    """Does what `SingleProcess` does, on each rank of a group."""

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float, merge: Literal["union"] | None
    ) -> None:
        """Connect the ranks. Collective.

        Raises:
            DistributedError: a rank does not come.
        """
        super().__init__(weights_only=True)
        self._group = group
        self._timeout = timeout
        self._merge = merge
        with self.propagate_errors("Checkpointer", users_code=False) as ranks:
            self.rank, self.count = ranks.rank, ranks.size
        self.is_main = self.rank == 0
        self._warned_of_refused = not self.is_main  # values are rank 0's
        self._calls = 0  # of `stop_requested`
        self._next = self._pause = 1
        self._last = (0, perf_counter())

    def propagate_errors(
        self, call: str = "Checkpointer", users_code: bool = True
    ) -> AbstractContextManager[RankGroup]:
        return collective(self._group, self._timeout, RankCall(call), _USE, user_code=users_code)

    def _start(self, state: dict[str, Any], job: SaveJob, base: str | None) -> PendingSave:
        return start_save(
            state,
            job.path,
            job.budget,
            group=self._group,
            timeout=self._timeout,
            merge=self._merge,
            began=job.began,
            then=job.then,
            base=base,
            versions=True,
        )

    @staticmethod
    def _state_of(value: Any) -> Any:
        """Return the state of an object; modules and optimizers themselves, which have shards."""
        inner = plain(value)
        return inner if _is_live(inner) else state_of(value)

    def _own_entry(self, job: SaveJob, data: bytes, ranks: Any) -> dict[str, Any]:
        """Return rank 0's entry of the Checkpointer; each rank adds the row with its values."""
        nbytes: int
        own: dict[str, Any]
        nbytes, own = ranks.decide_on_root(len(data), lambda sizes: (max(sizes), job.own))
        if nbytes:
            shape, start = (self.count, nbytes), self.rank * nbytes
            own["ranks"] = FlatShard(shape, torch.uint8, start, nbytes, row_of(data, nbytes))
        return own

    def steps(self, folder: CheckpointFolder) -> list[int]:
        def decision(folders: list[tuple[str, dict[int, int]]]) -> list[int]:
            seen: list[set[tuple[int, int]]] = [set(files.items()) for _, files in folders]
            common, missed = set.intersection(*seen), set.union(*seen)
            if missed and not common:
                paths = [path for path, _ in folders]
                rank, text = _nothing_in_common(ranks.jobs, paths, seen)
                raise ranks.fail(rank, text)
            if missed := missed - common:
                _log.warning(
                    "%s: not all ranks see the same file of step %s; it is skipped",
                    folder.path,
                    ", ".join(str(step) for step in sorted({step for step, _ in missed})),
                )
            return sorted((step for step, _ in common), reverse=True)

        with self.propagate_errors("Checkpointer.resume", users_code=False) as ranks:
            found: list[int] = ranks.decide_on_root((folder.path, folder.sizes()), decision)
            return found

    def read(self, wanted: ResumeRequest, path: str) -> tuple[dict[str, Any], NameDifference]:
        objects, there = wanted.objects, list[StateName]()
        with self.propagate_errors("Checkpointer.resume", users_code=False) as ranks:
            refusal, known = ranks.decide_on_root(
                set(objects), lambda names: (self._refusal(path, wanted), set.union(*names))
            )
        if refusal is not None:
            raise refusal

        def select(contents: dict[str, Any]) -> dict[str, Any]:
            own = contents.pop(OWN, {})
            found = renamed(contents, wanted.rename) if wanted.rename else contents
            there.extend(names_in(found))
            return {OWN: own, **{name: one for name, one in found.items() if name in known}}

        into = {OWN: None, **{name: _filled(value) for name, value in objects.items()}}
        with options(verify_on_load=True):
            beside = states(wanted.state, plain)
            report = load_file(
                path,
                into,
                self._group,
                True,
                wanted.strict,
                True,
                self._timeout,
                beside,
                select,
            )
        entries = {name.entry for name in there}
        missing = difference(names_here(objects, state_of_module), there, False).missing
        others = entries - known if wanted.only is None else ()
        unused = {*map(StateName, others), *(n for n in there if str(n) in report.unexpected_keys)}
        found = {name: one for name, one in into.items() if name == OWN or name in entries}
        return found, NameDifference(missing, sorted(unused, key=str))

    def _refusal(self, path: str, wanted: ResumeRequest) -> Exception | None:
        """Return why a file cannot be loaded, as rank 0 sees it. Bytes of tensors are not read."""
        try:
            with Descriptors() as files:
                fd = files.open(path, os.O_RDONLY)
                for record in read_places(DescriptorSource(fd)).records:
                    if record.name.startswith("data/") or not record.crc:
                        continue
                    found = crc32(os.pread(fd, record.size, record.data_offset))
                    check_crc(found, record.crc, path, record.name, record.data_offset)
                value = index_of_file(fd, path).value
        except ours(FileNotFoundError, CheckpointFileError) as error:
            return error
        own = value.get(OWN) if isinstance(value, dict) else None
        if not isinstance(own, Mapping):
            return UnreadableCheckpointError("it has no entry of a Checkpointer", path=path)
        rows = own.get("ranks")
        of_rank = [name for name in wanted.per_rank if wanted.wants(name)]
        if of_rank and wanted.strict and (rows is None or rows.shape[0] != self.count):
            return lacks_of_rank(path, of_rank)
        return None

    def restore(self, wanted: ResumeRequest, found: dict[str, Any], path: str) -> None:
        with self.propagate_errors("Checkpointer.resume"):
            super().restore(wanted, found, path)

    def asked(self, mine: int) -> int:
        """Return the flags of all ranks; between two exchanges 0.

        They are exchanged about once a second, and at least every `_MAX_PAUSE` calls: steps may
        become slow at any moment.
        """
        self._calls += 1
        if self._calls < self._next:
            return 0

        def decision(flags: list[int]) -> tuple[int, int]:
            now, (calls, then) = perf_counter(), self._last
            each = (now - then) / (self._calls - calls)
            self._last = (self._calls, now)
            pause = int(_PERIOD / max(each, 1e-6)) if self._calls > 1 else 1
            pause = max(1, min(pause, 2 * self._pause, _MAX_PAUSE))
            return functools.reduce(operator.or_, flags), pause

        with self.propagate_errors(
            "Checkpointer.save, whose turn it may be", users_code=False
        ) as ranks:
            found, pause = ranks.decide_on_root(mine, decision)
        self._pause = pause
        self._next = self._calls + pause
        return int(found)


def _nothing_in_common(
    jobs: Sequence[int], paths: list[str], seen: list[set[tuple[int, int]]]
) -> tuple[int, str]:
    """Return which rank's error it is that the ranks have no checkpoint in common, and its text.

    Args:
        jobs: the job's ranks of the group.
        paths: each rank's folder.
        seen: the steps and bytes of the files in it.
    """
    blamed = min(zip(seen, jobs, strict=True), key=lambda one: len(one[0]))[1]
    there = [
        f"rank {rank} sees {f'step {max(files)[0]}' if files else 'none'} in {path}"
        for rank, path, files in zip(jobs, paths, seen, strict=True)
    ]
    shown = "; ".join(there[:_SHOWN]) + ("; ..." if len(there) > _SHOWN else "")
    return blamed, (
        f"the ranks have no checkpoint in common to resume from: {shown}. Mount the same folder on "
        "all nodes; to start anew, move the checkpoints away"
    )


def holds_shards(objects: Mapping[str, Any]) -> bool:
    """Return whether an object, or a parameter of a module, is sharded, even on one rank only."""
    for _, value in walk(objects):
        if isinstance(value, torch.nn.Module):
            if any(type(module).__name__ == _FSDP_1 for module in value.modules()):
                return True
            if any(is_sharded(one) for one in value.parameters()):
                return True
        elif is_sharded(value):
            return True
    return False


def _is_live(value: Any) -> bool:
    """Return whether a value is a module, or an optimizer of parameters that have names."""
    if isinstance(value, torch.optim.Optimizer):
        return not has_own_form(value)
    return is_live(value)


def _filled(value: Any) -> Any:
    """Return what is filled in place; None for what the file replaces."""
    if is_object(value):
        inner = plain(value)
        return inner if _is_live(inner) else None
    if holds_objects(value):
        return rebuilt(value, _filled)
    held = leaves(value).values
    if isinstance(value, torch.Tensor) or any(is_sharded(leaf) for leaf in held):
        return value
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in held):
        return rebuilt(value, _filled)  # an optimizer may hold it, whose state needs its name
    return None
