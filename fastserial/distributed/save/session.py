"""`save`: every rank writes a part of one ordinary file, and no rank holds the whole.

1. Each rank makes the table of its state, and rank 0 lays the file out over memory that is never
   touched.
2. If the tables are alike, rank 0 makes the new file and sends the offsets of the records. Each
   rank finds out what it writes and sends, unless the last plan was the same, and opens the file.
3. The bytes flow.
4. The ranks add their checksums up; each writes those in its own blocks, and syncs.
5. Rank 0 syncs, and renames the file.

The messages of a save (`RankGroup.decide_on_root`): what the ranks have, and the decision; what
differs, if something does; that all are ready; with a base, what was cloned; the checksums; what
was written. With `merge="union"` the states first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from fastserial.config import current
from fastserial.distributed.comm.call import call_of
from fastserial.distributed.comm.exchange import Exchange
from fastserial.distributed.comm.group import RankGroup, collective, node_name, path_of
from fastserial.distributed.comm.replicas import Copies, join_copies
from fastserial.distributed.layout.placement import TensorSpec
from fastserial.distributed.save.full_pickle import FileLayout, Placeholders, lay_out
from fastserial.distributed.save.partition import FilePlan, Partition
from fastserial.distributed.save.shared_file import FileIdentity, NewFile, OpenedFile
from fastserial.distributed.save.writer import ShardWriter, joined_checksums
from fastserial.distributed.state.agreement import Agreement, Compared
from fastserial.distributed.state.facts import facts_of
from fastserial.distributed.state.merging import merged
from fastserial.distributed.state.tables import (
    Grids,
    StateTable,
    sources_of,
    synchronize_devices,
    table_of,
)
from fastserial.distributed.state.walk import Leaves, buffers_of, leaves, states
from fastserial.errors import ConfigError, WriteError, write_error
from fastserial.files.paths import absolute
from fastserial.formats.zip_layout import archive_name
from fastserial.interrupts import finish, finish_after, ours
from fastserial.memory.held_settings import paused_collection
from fastserial.overlap.snapshot import Snapshot
from fastserial.reasons import Reason
from fastserial.reports import RankReport, SaveReport, publish_save
from fastserial.saving.archive import storage_alignment
from fastserial.saving.extent_writer import Outcome

if TYPE_CHECKING:
    import torch.distributed as dist


Writers = Literal["all", "node"] | int
Ranges = dict[int, list[tuple[int, int, int]]]
_Made = TypeVar("_Made")


class StateSummary(NamedTuple):
    """What some ranks say of their states.

    Attributes:
        nodes: the first rank on each node.
        ranges: of each FlatShard: rank, first element, end.
        grids: of each mesh, those of these ranks; see `StateTable`.
        digests: see `Agreement`.
    """

    nodes: dict[str, int]
    ranges: Ranges
    grids: list[Grids]
    digests: dict[Compared, Copies]


def join_summaries(some: Sequence[StateSummary]) -> StateSummary:
    """Return what several say, in the order of their ranks, as one."""
    nodes: dict[str, int] = {}
    ranges: Ranges = {}
    for one in some:
        for node, rank in one.nodes.items():
            nodes.setdefault(node, rank)
        for source, held in one.ranges.items():
            ranges.setdefault(source, []).extend(held)
    return StateSummary(
        nodes,
        ranges,
        [_all_grids(each) for each in zip(*(one.grids for one in some), strict=False)],
        join_copies([one.digests for one in some]),
    )


def _all_grids(some: Sequence[Grids]) -> Grids:
    """Return the grids of one mesh that several ranks know."""
    if all(grids == some[0] for grids in some):
        return some[0]
    return tuple(sorted({grid for grids in some for grid in grids}))


class SaveDecision(NamedTuple):
    """What rank 0 decides.

    Attributes:
        differing: what of that which is compared differs (`Agreement`).
        plan: of the file.
        ranges: of each FlatShard: rank, first element, end.
        grids: see `Table`; of all ranks.
        file: the new one.
        base: path of the earlier file from which all clone what is the same, or None.
        several_nodes: the ranks are not all on one node.
    """

    differing: list[Compared]
    plan: FilePlan
    ranges: Ranges
    grids: list[Grids]
    file: FileIdentity
    base: str | None
    several_nodes: bool


def writing_ranks(
    writers: Writers, size: int, nodes: Mapping[str, int], alignment: int
) -> list[int]:
    """Return the ranks that write.

    Args:
        writers: as the user wants them.
        size: of the group.
        nodes: the first rank on each node.
        alignment: of the tensors' bytes in the file.

    Raises:
        ConfigError: torch's storage alignment is no multiple of 16 bytes, with several ranks.
        ValueError: no such writers.
    """
    if alignment % 16 and size > 1:
        raise ConfigError(
            f"with torch's storage alignment of {alignment} bytes elements would lie across the "
            "borders between ranks: many ranks need a multiple of 16"
        )
    if writers == "all":
        return list(range(size))
    if writers == "node":
        return sorted(nodes.values())
    if not isinstance(writers, int) or writers < 1:
        raise ValueError(f'writers must be "all", "node" or a number, not {writers!r}')
    count = min(writers, size)
    return [index * size // count for index in range(count)]


TIMEOUT = 600.0  # seconds


class _Written(NamedTuple):
    """What a rank sends at the end."""

    report: RankReport
    cloned: int


class _Finished(NamedTuple):
    """What rank 0 knows at the end: whether file and folder were synced, and why not."""

    durable: bool
    fallback: Reason | None


def save_file(
    obj: object,
    path: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    writers: Writers,
    timeout: float,
    merge: Literal["union"] | None,
    base: str | os.PathLike[str] | None,
) -> SaveReport:
    """Write one torch file; see `fastserial.distributed.save`. Collective."""
    began = perf_counter()
    saving: SaveTask | None = None
    try:
        with collective(group, timeout, call_of("distributed.save", path, obj)) as comm:
            name = path_of(path, obj, "distributed.save(obj, path)")
            saving = SaveTask(comm, name, writers, merge, began, base)
            report = saving.run(obj)
    except BaseException as error:
        if saving is not None:
            finish_after(error, saving.give_up)
        raise
    publish_save(report, saving.config.on_report, direct=saving.config.direct)
    return report


class SaveTask:
    """One save."""

    container = "zip"

    def __init__(
        self,
        comm: RankGroup,
        path: str,
        writers: Writers,
        merge: str | None,
        began: float,
        base: str | os.PathLike[str] | None = None,
        versions: bool = False,
    ) -> None:
        """Prepare; see `save` of `distributed`.

        Args:
            versions: see `walk.states`.
        """
        if merge not in (None, "union"):
            raise ConfigError(f'merge must be None or "union", not {merge!r}')
        self.comm = comm
        self.path = path
        self._writers = writers
        self._merge = merge
        self._versions = versions
        self._began = began
        self._base = None if base is None else absolute(os.fsdecode(base))
        self.config = current()
        self._new: NewFile | None = None
        self._opened: OpenedFile | None = None
        self._laid_out: FileLayout | None = None  # on rank 0
        self._reports: tuple[RankReport, ...] = ()
        self._cloned = 0
        self._unshared: Reason | None = None
        # Until the first byte is written:
        self._decision: SaveDecision
        self._writer: ShardWriter
        self._phases: dict[str, float] = {}

    def run(self, obj: object) -> SaveReport:
        """Save; return this rank's report."""
        self.prepare(obj)
        return self.finish()

    def prepare(self, obj: object) -> None:
        """Plan the save, and make the new file. Collective."""
        comm = self.comm
        with paused_collection():
            found, table = self._plan(obj)
            specs, partition = self._partition(table)
            if self._new is None:
                self._opened = OpenedFile(self._decision.file)
        planned = perf_counter()
        comm.barrier()
        self._phases = {"plan": planned - self._began, "wait": perf_counter() - planned}
        synchronize_devices(found.values)
        rest = self._laid_out.rest if self._laid_out is not None else ()
        sources = sources_of(table, specs, found.values, comm.rank, rest)
        self._writer = ShardWriter(self._decision.plan, partition, sources, self._laid_out)

    def freeze(self, taken: Snapshot) -> None:
        """Copy what is to be saved, if there is room, between `prepare` and `finish`."""
        self._writer.freeze(taken)

    def finish(self) -> SaveReport:
        """Write; return what this rank knows of the save. Collective."""
        try:
            done, outcome = self._write()
            finished = self.comm.decide_on_root(done, self._conclude)
        except ours(OSError) as error:
            raise self._explained(error) from error
        if self._opened is not None:
            self._opened.close()
        return self._report(done.report, outcome, finished)

    def _plan(self, obj: object) -> tuple[Leaves, StateTable]:
        """Agree with the other ranks on the plan; on rank 0, make the new file."""
        comm = self.comm
        found = leaves(obj)
        modules, state = found.live, obj
        buffers = buffers_of(modules)
        if modules:
            state = states(obj, modules, self._versions)
        if self._merge == "union":
            state = merged(state, comm, buffers)
        if state is not obj:
            found = leaves(state)
        table = self._table(found, buffers)
        agreement = Agreement(found, table, comm, self.config)
        if comm.rank == 0:
            self._laid_out = self._lay_out(table, state, found.values)
        ranges: Ranges = {}
        for source, first, stop in table.ranges():
            ranges.setdefault(source, []).append((comm.rank, first, stop))
        mine = StateSummary({node_name(): comm.rank}, ranges, table.grids, agreement.digests)
        self._decision = comm.reduce_on_root(mine, join_summaries, self._decide)
        if self._decision.differing:
            agreement.raise_if_different(self._decision.differing)
        return found, table

    def _kept(self, name: str, made_from: object, make: Callable[[], _Made]) -> _Made:
        """Return what was made in the last save if it was made from the same, else make it.

        Nothing of the state itself is kept.
        """
        kept: Any = self.comm.kept
        if name not in kept or kept[name][0] != made_from:
            kept[name] = made_from, make()
        made: _Made = kept[name][1]
        return made

    def _table(self, found: Leaves, buffers: set[int]) -> StateTable:
        comm, facts = self.comm, facts_of(found.paths, found.values, buffers)
        made_from = object() if facts is None else facts
        return self._kept(
            "table", made_from, lambda: table_of(found, comm.rank, comm.ranks, buffers)
        )

    def _partition(self, table: StateTable) -> tuple[list[TensorSpec], Partition]:
        """Return the tensors as all ranks hold them, and what this rank does."""
        comm, decision = self.comm, self._decision

        def make() -> tuple[list[TensorSpec], Partition]:
            specs = table.completed(decision.ranges, decision.grids, decision.plan.records)
            return specs, Partition(decision.plan, specs, comm.rank, comm.size)

        made_from = decision.plan, decision.ranges, decision.grids, table.digest
        return self._kept(self.container, made_from, make)

    def _lay_out(self, table: StateTable, state: Any, values: Sequence[Any]) -> FileLayout:
        """Lay the file out. On rank 0."""
        placeholders = self._kept("placeholders", table, lambda: Placeholders(table, values))
        return lay_out(self._archive(), state, values, placeholders)

    def _archive(self) -> str:
        """Return the name that torch puts before the names of the file's records."""
        archive = archive_name(self.path)
        if not archive:
            raise write_error(errno.EINVAL, self.path, "torch cannot save to such a name")
        return archive

    def _decide(self, found: StateSummary) -> SaveDecision:
        """Return rank 0's decision for all ranks."""
        if self._laid_out is None:
            raise ValueError("only rank 0 decides")
        # safetensors aligns each element to its own size
        alignment = storage_alignment() if self.container == "zip" else 16
        writers = writing_ranks(self._writers, self.comm.size, found.nodes, alignment)
        plan = self._laid_out.file_plan(writers)
        plan = plan._replace(cuts_replicas=self.config.compare == "all")
        self._new = NewFile(self.path, self.config)
        file = self._new.resize(self._laid_out.nbytes)
        if self._base is None:
            self._new.reserve()
        differing = [what for what, one in found.digests.items() if one.others]
        several = len(found.nodes) > 1
        return SaveDecision(differing, plan, found.ranges, found.grids, file, self._base, several)

    def _write(self) -> tuple[_Written, Outcome]:
        """Write this rank's part; return what rank 0 has to know of it."""
        comm, writer, opened = self.comm, self._writer, self._opened
        exchange = Exchange(comm, self.config)
        fd = opened.fd if opened is not None else self._new.file.fd if self._new is not None else -1
        if self._decision.base is not None:
            writer.clone(fd, self._decision.base, self.config, comm.heartbeat)
            # Here a rank waits as long as the others are alive.
            cloned = writer.cloned, writer.unshared
            self._unshared = comm.decide_on_root(cloned, self._reserve_unless_cloned)
        outcome = writer.write(fd, self.config, exchange, lambda nbytes: comm.heartbeat())
        ending = comm.reduce_on_root(writer.checksums(), joined_checksums, writer.ending)
        syncing = perf_counter()
        writer.end(fd, ending)
        # Each rank what it wrote: equal boot ids are not one page cache (two FUSE mounts, say). On
        # several nodes also if the save is not durable: else pages would follow after the rename,
        # and their errors be lost.
        if opened is not None and (self.config.durable or self._decision.several_nodes):
            opened.sync()
        report = RankReport(
            rank=comm.job_rank,
            node=node_name(),
            bytes=writer.nbytes - writer.cloned,
            sent_bytes=exchange.sent_bytes,
            received_bytes=exchange.received_bytes,
            phases={**self._phases, **writer.seconds, "sync": perf_counter() - syncing},
        )
        return _Written(report, writer.cloned), outcome

    def _reserve_unless_cloned(self, found: list[tuple[int, Reason | None]]) -> Reason | None:
        """Reserve the file's space if no rank cloned a part of it. On rank 0.

        Reserved space would be lost where a block is cloned.

        Returns:
            Why a rank could not clone all that is the same, or None.
        """
        if self._new is not None and not any(cloned for cloned, _ in found):
            self._new.reserve()
        return next((reason for _, reason in found if reason is not None), None)

    def _conclude(self, done: list[_Written]) -> _Finished:
        """Finish the file. On rank 0."""
        self._reports = tuple(found.report for found in done)
        self._cloned = sum(found.cloned for found in done)
        if self._new is None:
            raise ValueError("only rank 0 concludes")
        began = perf_counter()
        self._new.file.sync()
        self._new.file.commit()
        self._reports[0].phases["sync"] += perf_counter() - began
        return _Finished(self._new.file.durable, self._new.file.fallback)

    def _report(self, mine: RankReport, outcome: Outcome, finished: _Finished) -> SaveReport:
        return SaveReport(
            path=self.path,
            container=self.container,
            bytes=self._decision.file.nbytes,
            cloned=self._cloned,
            seconds=perf_counter() - self._began,
            engine=outcome.engine,
            direct=outcome.direct,
            durable=finished.durable,
            fallback=finished.fallback or self._unshared or outcome.fallback,
            phases=self._reports[0].phases if self._reports else mine.phases,
            transfer=outcome.transfer.word,
            transfer_why=outcome.transfer.why,
            ranks=self._reports,
            rank=self.comm.job_rank,
        )

    def _explained(self, error: OSError) -> WriteError:
        if isinstance(error, WriteError):
            return error
        if self._new is not None:
            return self._new.explained(error)
        return write_error(error.errno or errno.EIO, self.path, None)

    def give_up(self) -> None:
        """Remove the new file: every rank that is left does it, while it holds the file open.

        So the file of a later save cannot be taken for it.
        """
        steps: list[Callable[[], object]] = []
        if self._new is not None:
            steps.append(self._new.file.discard)
        if self._opened is not None:
            steps += [self._opened.remove, self._opened.close]
        finish(*steps)
