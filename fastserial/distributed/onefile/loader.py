"""`fastserial.distributed.load`: a torch file, or a folder of safetensors files, on many ranks.

`dcp_folder` has the task for folders of torch.distributed.checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch.distributed as dist

from fastserial import config as config_module
from fastserial.checkpoints.verify.file_list import read_index
from fastserial.checksums import PartialCrc as CrcPiece
from fastserial.checksums import crc_mismatch, joined_crc
from fastserial.config import Config
from fastserial.distributed.load.read_plan import ReadPlan
from fastserial.distributed.load.reader import Flow, divided_jobs, grids_of, read_odd
from fastserial.distributed.load.wanted import Demands, demands_of, texts_of
from fastserial.distributed.plan.matching import Match, file_leaves, path_name, unused
from fastserial.distributed.ranks.call import call_of
from fastserial.distributed.ranks.distinct import gather_distinct
from fastserial.distributed.ranks.group import Traffic, collective, node_name, path_of
from fastserial.distributed.reading.part_reader import PartReader
from fastserial.distributed.sharding.boxes import runs_of
from fastserial.distributed.sharding.file_index import (
    FileIndex,
    FileTensor,
    fingerprint,
    index_of_file,
)
from fastserial.distributed.sharding.grid import Grid
from fastserial.errors import CorruptCheckpointError, DistributedError, LoadMismatchError
from fastserial.formats.container import is_dcp_folder
from fastserial.formats.safetensors import INDEX, ONE_FILE
from fastserial.interrupts import cleanup, finish, ours
from fastserial.loading.reader import FastFileReader
from fastserial.memory.held_settings import paused_collection
from fastserial.nests import Path
from fastserial.reports import LoadReport, RankReport, publish_load

_FOUND = b"found"  # what a rank says of its comparison begins with that
_Texts = tuple[Sequence[str], Sequence[int]]  # texts, and the ranks that have them
_SHOWN = 20  # keys, and mismatches, that an error names
_RACES = 8  # so often the file may be replaced while the ranks open it
HALFWAY = "What was to be filled is filled in part: load it again before you use it"


def _everything(contents: Any) -> Any:
    return contents


def load_file(
    path: str | os.PathLike[str],
    into: Any,
    group: dist.ProcessGroup | None,
    broadcast: bool,
    strict: bool,
    cast: bool,
    timeout: float,
    folder_task: Callable[..., LoadTask],
    beside: object = None,
    select: Callable[[Any], Any] = _everything,
) -> LoadReport:
    """Fill what the ranks hold; see `fastserial.distributed.load`. Collective.

    Args:
        beside: a nest with the modules that name the parameters of optimizers, if `into` may lack
            them.
        select: returns what counts of the file's contents, under the keys of `into`; the same on
            all ranks.
        folder_task: makes the task for a folder of torch.distributed.checkpoint.
    """
    began = perf_counter()
    task: LoadTask | None = None
    refusal, result = "", None

    def close() -> None:
        if task is not None:
            task.close()

    with cleanup(close):
        try:
            # Each rank may have a copy of the file, in a folder of its own.
            with collective(group, timeout, call_of("distributed.load")) as traffic:
                config = config_module.current()
                name = path_of(path, into, "distributed.load(path, into)")
                is_folder = traffic.decide(None, lambda _: is_dcp_folder(name))
                make = folder_task if is_folder else LoadTask
                task = make(traffic, name, config, broadcast, strict, began)
                task.select = select
                refusal = task.compare(into, cast, beside)
                if not refusal:
                    result = task.fill()
            if refusal or result is None:
                raise LoadMismatchError(refusal)
            if result.damage:
                raise CorruptCheckpointError(result.damage, path=task.path)
            report = task.report(result)
            publish_load(report, config.on_load)
            return report
        except ours(DistributedError) as error:
            if task is not None and task.is_filling:
                error.cause = f"{error.cause}. {HALFWAY}"
            raise


class _Read(NamedTuple):
    """What a rank did, and the checksums of what it read."""

    line: RankReport
    pieces: list[CrcPiece]
    all_checked: bool


class LoadResult(NamedTuple):
    """What is damaged, if anything is; and whether all checksums were compared."""

    damage: str
    verified: bool
    ranks: tuple[RankReport, ...]


class LoadTask:
    """One load on one rank.

    Attributes:
        is_filling: tensors may have been changed.
        select: see `load_file`.
    """

    def __init__(
        self,
        traffic: Traffic,
        path: str,
        config: Config,
        broadcast: bool,
        strict: bool,
        began: float,
    ) -> None:
        self._traffic = traffic
        self.path = path
        self._config = config
        self._broadcast = broadcast
        self._strict = strict
        self._began = began
        self.is_filling = False
        self.select: Callable[[Any], Any] = _everything
        self._readers: dict[str, FastFileReader] = {}  # by the names of the files
        self._file_of: dict[int, str] = {}  # by the tensors' numbers
        self._planned = began

    def close(self) -> None:
        """Close the files. Idempotent."""
        finish(*(reader.close for reader in self._readers.values()))

    def compare(self, into: Any, cast: bool, beside: object = None) -> str:
        """Compare what is wanted with what there is, on all ranks.

        Returns:
            Why it does not fit, the same text on every rank; empty if it does.
        """
        traffic = self._traffic
        with paused_collection():
            value = self.select(self._contents(self._read_index()))
            leaves = file_leaves(value)
            grids: dict[int, Grid] = {}
            for name in self._readers:  # tensors of two files may lie at the same offset
                grids |= grids_of([one for one in leaves if self._is_in(name, one[1])])
            tied = self._container == "safetensors"  # a file has the first of tied tensors only
            self._match = match = Match(traffic.rank, traffic.ranks, cast, tied, self._strict)
            match.compare(into, value, beside)
            self._jobs = divided_jobs(match.jobs, grids)
            wanted = texts_of(self._jobs.arrays, grids) if self._broadcast else []
            refusal = self._compare_ranks(leaves, wanted)
            if not refusal:
                demands = Demands(demands_of(self._wanted)) if self._broadcast else None
                self._plans = {name: self._plan(name, grids, demands) for name in self._readers}
        self._planned = perf_counter()
        return refusal

    def _plan(self, name: str, grids: Mapping[int, Grid], demands: Demands | None) -> ReadPlan:
        """Return what this rank reads of a file, and what it gets from others."""
        here = [one for one in self._jobs.targets if self._is_in(name, one.grid.tensor)]
        arrays = [
            grid
            for number, grid in grids.items()
            if grid.tensor.number == number and self._file_of[number] == name
        ]
        return ReadPlan(arrays, here, demands, self._traffic.rank)

    def _compare_ranks(self, leaves: list[tuple[Path, Any]], wanted: Sequence[bytes]) -> str:
        """Tell the other ranks what was found, and hear what they found. Collective.

        Args:
            leaves: what the file holds.
            wanted: what this rank wants, see `texts_of`.

        Returns:
            Why the file does not fit, the same text on every rank; empty if it does.
        """
        match, names = self._match, [path_name(where) for where, _ in leaves]
        call = self._broadcast, self._strict, self._config.verify_on_load
        rest = runs_of(unused(leaves, match.used))
        mine = json.dumps([match.missing, match.problems, call, rest]).encode()
        found = gather_distinct(self._traffic, [_FOUND + mine, *wanted])
        self._wanted = [one for one in found if not one.text.startswith(_FOUND)]
        jobs = self._traffic.jobs
        every = [
            (*json.loads(text.removeprefix(_FOUND)), [jobs[rank] for rank in ranks])
            for text, ranks in found
            if text.startswith(_FOUND)
        ]
        unexpected = set(range(len(names)))
        for *_, runs, _ in every:
            unexpected.intersection_update(number for run in runs for number in range(*run))
        extra = [names[number] for number in sorted(unexpected)]
        self._unexpected = tuple(extra)
        problems = [(texts, ranks) for _, texts, *_, ranks in every]
        if len({tuple(call) for _, _, call, *_ in every}) > 1:
            text = "broadcast, strict and verify_on_load are not the same on all ranks"
            problems.append(([text], jobs))
        missing = [(texts, ranks) for texts, *_, ranks in every]
        return refusal_of(self.path, problems, missing, extra, self._strict, len(jobs))

    def _read_index(self) -> dict[str, FileIndex]:
        """Read the index of each file on rank 0, and open the same files on all ranks.

        If another process replaces a file in between, they try again.
        """

        def read(_: list[Any]) -> dict[str, FileIndex]:
            return {
                name: index_of_file(self._open(name).fd, self._path_of(name))
                for name in _files_of(self.path)
            }

        for left in reversed(range(_RACES)):
            indexes: dict[str, FileIndex] = self._traffic.decide(None, read)
            same = all(self._has(name, index) for name, index in indexes.items())
            if not same and not left:
                break
            if self._traffic.decide(same, all):
                return indexes
            self.close()
            self._readers.clear()
        raise CorruptCheckpointError(
            "it is not the file that rank 0 sees; every rank needs the same one", path=self.path
        )

    def _has(self, name: str, index: FileIndex) -> bool:
        """Return whether a file is, on this rank, the one that an index is of."""
        reader = self._open(name)
        is_as_large = reader.size == index.size
        return is_as_large and fingerprint(reader.fd, reader.size) == index.fingerprint

    def _open(self, name: str) -> FastFileReader:
        if name not in self._readers:
            self._readers[name] = FastFileReader(self._path_of(name), self._config)
        return self._readers[name]

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, name) if name else self.path

    def _contents(self, indexes: dict[str, FileIndex]) -> Any:
        """Return what all files hold together, with a number of its own for each tensor."""
        first, *others = indexes.values()
        self._container, self._records = first.container, first.records
        count = 0
        for name, index in indexes.items():
            tensors = [one for _, one in file_leaves(index.value) if isinstance(one, FileTensor)]
            for tensor in tensors if others else ():
                tensor.number, tensor.same = tensor.number + count, tensor.same + count
            self._file_of.update((tensor.number, name) for tensor in tensors)
            count += len(tensors)
        if not others:
            return first.value
        return {key: value for index in indexes.values() for key, value in index.value.items()}

    # -- bytes ---------------------------------------------------------------------------------

    def fill(self) -> LoadResult:
        """Read and exchange all bytes; set what is not a tensor's memory.

        Returns:
            The result, the same on all ranks.
        """
        self.is_filling = True
        self._move()
        result = self._judge()
        if not result.damage:
            with self._traffic.together(theirs=True):
                self._match.finish()
        return result

    def _move(self) -> None:
        """Read and exchange the bytes, file by file."""
        wants_records = self._config.verify_on_load
        self._known = [one for one in self._records if wants_records and one.crc is not None]
        self._flows: list[Flow] = []
        self._own_seconds = self._shared_seconds = 0.0
        for name, reader in self._readers.items():
            began = perf_counter()
            parts = PartReader(reader, self._known, between=self._traffic.alive)
            flow = Flow(self._traffic, parts, self._plans[name])
            self._flows.append(flow)
            parts.read_own(self._plans[name].alone)
            read_odd([job for job in self._jobs.odd if self._is_in(name, job.tensor)], reader)
            self._own_seconds += perf_counter() - began
            if self._broadcast:
                flow.share()
            self._shared_seconds += perf_counter() - began
        self._shared_seconds -= self._own_seconds

    def _is_in(self, name: str, leaf: object) -> bool:
        """Return whether a leaf is a tensor of a file."""
        return isinstance(leaf, FileTensor) and self._file_of[leaf.number] == name

    def _judge(self) -> LoadResult:
        """Compare the checksums with what all ranks read, and gather what they did."""
        flows = self._flows
        line = RankReport(
            rank=self._traffic.job_rank,
            node=node_name(),
            bytes=sum(flow.parts.bytes_read for flow in flows),
            sent_bytes=sum(flow.exchange.sent_bytes for flow in flows),
            received_bytes=sum(flow.exchange.received_bytes for flow in flows),
            phases={
                "plan": self._planned - self._began,
                "own": self._own_seconds,
                "share": self._shared_seconds,
            },
        )
        checked = self._config.verify_on_load and not self._jobs.odd
        all_checked = checked and all(map(flows[0].parts.checks, self._jobs.targets))
        mine = _Read(line, flows[0].parts.ledger.pieces(), all_checked)
        result: LoadResult = self._traffic.decide(mine, self._decide_on_checksums)
        return result

    def _decide_on_checksums(self, done: Sequence[_Read]) -> LoadResult:
        # Without broadcast each rank may have read all of a record, perhaps of a copy of its own.
        groups = [done] if self._broadcast else [*([one] for one in done), done]
        damage, whole = "", False
        for group in groups:
            found, whole = self._compare_checksums(group)
            damage = damage or found
        verified = whole and not damage and all(one.all_checked for one in done)
        return LoadResult(damage, verified, tuple(one.line for one in done))

    def _compare_checksums(self, done: Sequence[_Read]) -> tuple[str, bool]:
        """Return what is damaged, if anything is, and whether all records are known as a whole."""
        pieces: dict[int, set[CrcPiece]] = {}
        readers: dict[int, list[str]] = {}
        for one in done:
            for number in sorted({piece.record for piece in one.pieces}):
                readers.setdefault(number, []).append(str(one.line.rank))
            for piece in one.pieces:
                pieces.setdefault(piece.record, set()).add(piece)
        known = True
        for number, some in sorted(pieces.items()):
            record = self._known[number]
            crc, at = joined_crc(some)
            if at < record.nbytes or record.crc is None:
                known = False
            elif (mismatch := crc_mismatch(crc, record.crc)) is not None:
                ranks = ", ".join(readers[number])
                damage = f"record {record.name} is damaged: {mismatch} (read by rank {ranks})"
                return f"{damage}. {HALFWAY}", False
        return "", known

    def report(self, result: LoadResult) -> LoadReport:
        """Return what happened."""
        blocks = [reader.blocks for reader in self._readers.values()]
        counts = [one.counts for one in blocks]
        return LoadReport(
            path=self.path,
            container=self._container,
            bytes=sum(line.bytes for line in result.ranks),
            seconds=perf_counter() - self._began,
            engine=blocks[0].engine_name,
            direct_bytes=sum(one.direct for one in counts),
            cached_bytes=sum(one.cached for one in counts),
            verified=result.verified,
            fallback=next((one.fallback for one in blocks if one.fallback), None),
            ranks=result.ranks,
            missing_keys=tuple(self._match.missing),
            unexpected_keys=self._unexpected,
        )


def refusal_of(
    path: str,
    problems: Sequence[_Texts],
    missing: Sequence[_Texts],
    unexpected: Sequence[str],
    strict: bool,
    size: int,
) -> str:
    """Return why a checkpoint does not fit what is to be filled, empty if it does.

    Args:
        problems, missing: each with the ranks that have them.
        unexpected: what no rank wants.
        size: how many ranks there are.
    """
    lines = _with_ranks(problems, size)
    if strict:
        absent = _with_ranks(missing, size)
        lines += [f"not in the file: {_listed(absent)}"] if absent else []
        lines += [f"only in the file: {_listed(unexpected)}"] if unexpected else []
    if not lines:
        return ""
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    text = "\n\t".join([*lines[:_SHOWN], *more])
    return f"{path} does not fit what is to be filled:\n\t{text}"


def _files_of(path: str) -> list[str]:
    """Return the names of a folder's safetensors files; of a file an empty one.

    Raises:
        CorruptCheckpointError: the index is damaged, names no file, or one outside of the folder.
        OSError: it cannot be read, or is a folder of something else.
    """
    if not os.path.isdir(path):
        return [""]
    index = os.path.join(path, INDEX)
    if os.path.exists(index):
        names = list(read_index(index))
        if not names:
            raise CorruptCheckpointError("it names no file", path=index)
        return names
    if os.path.exists(os.path.join(path, ONE_FILE)):
        return [ONE_FILE]
    text = "it is a folder, neither of safetensors files nor of torch.distributed.checkpoint"
    raise IsADirectoryError(errno.EISDIR, text, path)


def _with_ranks(found: Sequence[_Texts], size: int) -> list[str]:
    """Return the texts of all ranks, each once, with the ranks unless it is all of them."""
    having: dict[str, list[int]] = {}
    for texts, ranks in found:
        for text in texts:
            having.setdefault(text, []).extend(ranks)
    return [
        text if len(who) == size else f"{text} (rank {', '.join(map(str, sorted(who)))})"
        for text, who in having.items()
    ]


def _listed(keys: Sequence[str]) -> str:
    shown = ", ".join(keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown
