"""`fastserial.distributed.load`: a torch file, or a folder, on many ranks.

A folder is one of safetensors files, or of torch.distributed.checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch.distributed as dist

from fastserial import config as config_module
from fastserial.checkpoints.verify.file_list import read_index
from fastserial.checksums import PartialCrc as CrcPiece
from fastserial.checksums import crc_mismatch, joined_crc
from fastserial.config import Config
from fastserial.distributed.comm.call import call_of
from fastserial.distributed.comm.distinct import gather_distinct
from fastserial.distributed.comm.group import RankGroup, collective, node_name, path_of
from fastserial.distributed.layout.boxes import runs_of
from fastserial.distributed.layout.file_index import (
    FileIndex,
    FileTensor,
    Record,
    index_of_file,
)
from fastserial.distributed.load.files import StoredFiles
from fastserial.distributed.load.matching import Match, file_leaves, path_name, unused
from fastserial.distributed.load.part_reader import PartReader
from fastserial.distributed.load.read_plan import ReadPlan
from fastserial.distributed.load.reader import (
    Arrays,
    Flow,
    Jobs,
    divided_jobs,
    read_odd,
    records_of,
)
from fastserial.distributed.load.wanted import Demands, demands_of, texts_of
from fastserial.errors import CorruptCheckpointError, DistributedError, LoadMismatchError
from fastserial.formats.container import is_dcp_folder
from fastserial.formats.dcp import METADATA
from fastserial.formats.safetensors import INDEX, ONE_FILE
from fastserial.interrupts import cleanup, ours
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
    beside: object = None,
    select: Callable[[Any], Any] = _everything,
) -> LoadReport:
    """Fill what the ranks hold; see `fastserial.distributed.load`. Collective.

    Args:
        beside: a nest with the modules that name the parameters of optimizers, if `into` may lack
            them.
        select: returns what counts of the file's contents, under the keys of `into`; the same on
            all ranks.
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
            with collective(group, timeout, call_of("distributed.load")) as comm:
                config = config_module.current()
                name = path_of(path, into, "distributed.load(path, into)")
                task = LoadTask(comm, name, config, broadcast, strict, began)
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
    damage: str
    pieces: list[tuple[Record, CrcPiece]]
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
        comm: RankGroup,
        path: str,
        config: Config,
        broadcast: bool,
        strict: bool,
        began: float,
    ) -> None:
        self._comm = comm
        self.path = path
        self._config = config
        self._broadcast = broadcast
        self._strict = strict
        self._began = began
        self.is_filling = False
        self.select: Callable[[Any], Any] = _everything
        self._files = StoredFiles(path, config)
        self._damage = ""
        self._planned = began

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._files.close()

    def compare(self, into: Any, cast: bool, beside: object = None) -> str:
        """Compare what is wanted with what there is, on all ranks.

        Returns:
            Why it does not fit, the same text on every rank; empty if it does.
        """
        comm = self._comm
        with paused_collection():
            value = self._contents(self._read_index(), into)
            if self._damage:
                return ""
            value = self.select(value)
            leaves = file_leaves(value)
            arrays = Arrays(leaves, self._files)
            tied = self._container == "safetensors"  # a file has the first of tied tensors only
            self._match = match = Match(comm.rank, comm.ranks, cast, tied, self._strict)
            match.compare(into, value, beside)
            self._jobs = Jobs([], [], [], [])
            try:
                self._jobs = divided_jobs(match.jobs, arrays)
            except ours(CorruptCheckpointError) as error:
                self._damage = f"{error} (read by rank {comm.job_rank})"
            wanted = texts_of(self._jobs.jobs, arrays.number_of) if self._broadcast else []
            refusal = self._compare_ranks(leaves, wanted)
            if not refusal and not self._damage:
                demands = Demands(demands_of(self._wanted)) if self._broadcast else None
                jobs, verify = self._jobs, self._config.verify_on_load
                self._plan = ReadPlan(jobs.grids, jobs.targets, demands, comm.rank, verify)
        self._planned = perf_counter()
        return refusal

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
        free = runs_of(unused(leaves, match.used))
        used = {*match.used, *match.offered}
        rest = runs_of(unused(leaves, used)) if match.offered else free, free
        mine = json.dumps([self._damage, match.missing, match.problems, call, rest]).encode()
        found = gather_distinct(self._comm, [_FOUND + mine, *wanted])
        self._wanted = [one for one in found if not one.text.startswith(_FOUND)]
        jobs = self._comm.jobs
        every = [
            (*json.loads(text.removeprefix(_FOUND)), [jobs[rank] for rank in ranks])
            for text, ranks in found
            if text.startswith(_FOUND)
        ]
        unexpected, of_none = (
            set.intersection(*(_numbers(runs[which]) for *_, runs, _ in every)) for which in (0, 1)
        )
        extra = [names[number] for number in sorted(unexpected)]
        self._unexpected = tuple(extra)
        match.leave_out(path for number, (path, _) in enumerate(leaves) if number not in of_none)
        self._damage = next((damage for damage, *_ in every if damage), "")
        problems = [(texts, ranks) for _, _, texts, *_, ranks in every]
        if len({tuple(call) for *_, call, _, _ in every}) > 1:
            text = "broadcast, strict and verify_on_load are not the same on all ranks"
            problems.append(([text], jobs))
        missing = [(texts, ranks) for _, texts, *_, ranks in every]
        return refusal_of(self.path, problems, missing, extra, self._strict, len(jobs))

    def _read_index(self) -> dict[str, FileIndex]:
        """Read the index of each file on rank 0, and open the same files on all ranks.

        If another process replaces a file in between, they try again.
        """

        def read(_: list[Any]) -> dict[str, FileIndex]:
            if is_dcp_folder(self.path):
                from fastserial.distributed.load.folder_contents import index_of_folder

                return {METADATA: index_of_folder(self._files, self._comm.heartbeat)}
            files = self._files
            return {
                name: index_of_file(files.open(name).fd, files.path_of(name), name)
                for name in _files_of(self.path)
            }

        for left in reversed(range(_RACES)):
            indexes: dict[str, FileIndex] = self._comm.decide_on_root(None, read)
            same = all(self._has(name, index) for name, index in indexes.items())
            if not same and not left:
                break
            if self._comm.decide_on_root(same, all):
                return indexes
            self.close()
            self._files = StoredFiles(self.path, self._config)
        raise CorruptCheckpointError(
            "it is not the file that rank 0 sees; every rank needs the same one", path=self.path
        )

    def _has(self, name: str, index: FileIndex) -> bool:
        """Return whether a file is, on this rank, the one that an index is of."""
        file = self._files.open(name)
        if index.container == "dcp":  # the other files change when this one does
            self._files.completed = file.name, file.stamp
        return file.size == index.size and index.is_of(file.fd)

    def _contents(self, indexes: dict[str, FileIndex], into: Any) -> Any:
        """Return what all files hold together, with a number of its own for each tensor."""
        first, *others = indexes.values()
        self._container, self._damage = first.container, first.damage
        self._index = first
        files = self._files
        files.names = list(first.files or indexes)
        files.has_items = first.container == "dcp"
        if files.has_items and not first.damage:
            from fastserial.distributed.load.folder_contents import number_keys

            number_keys(first.value, into)
        if not others:
            return first.value
        count = 0
        for index in indexes.values():
            tensors = [one for _, one in file_leaves(index.value) if isinstance(one, FileTensor)]
            for tensor in tensors:
                tensor.number, tensor.same = tensor.number + count, tensor.same + count
            count += len(tensors)
        return {key: value for index in indexes.values() for key, value in index.value.items()}

    # -- bytes ---------------------------------------------------------------------------------

    def fill(self) -> LoadResult:
        """Read and exchange all bytes; set what is not a tensor's memory.

        Returns:
            The result, the same on all ranks.
        """
        if self._damage:
            return LoadResult(self._damage, False, ())
        self.is_filling = True
        result = self._move()
        if not result.damage:
            with self._comm.propagate_errors(user_code=True):
                self._match.finish()
        return result

    def _move(self) -> LoadResult:
        """Read and exchange the bytes; compare the checksums with what all ranks read."""
        began, verify = perf_counter(), self._config.verify_on_load
        records = records_of(self._jobs.grids) if self._files.has_items else self._index.records
        known = list(records) if verify else []
        whole = self._plan.whole
        parts = PartReader(self._files, known, whole=whole, between=self._comm.heartbeat)
        flow = Flow(self._comm, parts, self._plan)
        parts.read_own(self._plan.alone)
        damage = ""
        try:
            read_odd(self._jobs.odd, self._files)
        except ours(CorruptCheckpointError) as error:
            damage = f"{error} (read by rank {self._comm.job_rank}). {HALFWAY}"
        own = perf_counter()
        if self._broadcast:
            flow.share()
        counts, exchange = self._files.report()["counts"], flow.exchange
        line = RankReport(
            rank=self._comm.job_rank,
            node=node_name(),
            bytes=counts.direct + counts.cached,
            sent_bytes=exchange.sent_bytes,
            received_bytes=exchange.received_bytes,
            phases={
                "plan": self._planned - self._began,
                "own": own - began,
                "share": perf_counter() - own,
            },
        )
        odd = [one for one in self._jobs.odd if one.chunk is not None]
        checked = verify and not odd and self._index.is_verified
        all_checked = checked and all(map(parts.checks, self._jobs.targets))
        pieces = [(known[piece.record], piece) for piece in parts.ledger.pieces()]
        mine = _Read(line, damage, pieces, all_checked)
        result: LoadResult = self._comm.decide_on_root(mine, self._decide_on_checksums)
        return result

    def _decide_on_checksums(self, done: Sequence[_Read]) -> LoadResult:
        # Without broadcast each rank may have read all of a record, perhaps of a copy of its own.
        groups = [done] if self._broadcast else [*([one] for one in done), done]
        damage, whole = next((one.damage for one in done if one.damage), ""), False
        for group in groups:
            found, whole = self._compare_checksums(group)
            damage = damage or found
        verified = whole and not damage and all(one.all_checked for one in done)
        return LoadResult(damage, verified, tuple(one.line for one in done))

    def _compare_checksums(self, done: Sequence[_Read]) -> tuple[str, bool]:
        """Return what is damaged, if anything is, and whether all records are known as a whole."""
        pieces: dict[Record, set[CrcPiece]] = {}
        readers: dict[Record, list[str]] = {}
        for one in done:
            for record in {record: None for record, _ in one.pieces}:
                readers.setdefault(record, []).append(str(one.line.rank))
            for record, piece in one.pieces:
                pieces.setdefault(record, set()).add(piece._replace(record=0))
        known = True
        for record, some in sorted(pieces.items(), key=lambda pair: pair[0].offset):
            crc, at = joined_crc(some)
            if at < record.nbytes:
                known = False
            elif (mismatch := crc_mismatch(crc, record.crc)) is not None:
                ranks = ", ".join(readers[record])
                damage = f"record {record.name} is damaged: {mismatch} (read by rank {ranks})"
                return f"{damage}. {HALFWAY}", False
        return "", known

    def report(self, result: LoadResult) -> LoadReport:
        """Return what happened."""
        done = self._files.report()
        counts = done["counts"]
        return LoadReport(
            path=self.path,
            container=self._container,
            bytes=sum(line.bytes for line in result.ranks),
            seconds=perf_counter() - self._began,
            engine=done["engine"],
            direct_bytes=counts.direct,
            cached_bytes=counts.cached,
            verified=result.verified,
            fallback=done["fallback"],
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


def _numbers(runs: Iterable[Sequence[int]]) -> set[int]:
    return {number for run in runs for number in range(*run)}


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
