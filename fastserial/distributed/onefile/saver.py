"""`save`: every rank writes a part of one ordinary file, and no rank holds the whole.

1. Each rank compares its tensors with those of the last save, and rank 0 lays the file out over
   memory that is never touched. If nothing changed on any rank, nor the places of the records, the
   last plan does: rank 0 makes the new file and says so.
2. Else each rank makes the table of its state. If the tables are alike, rank 0 sends the places of
   the records. Each rank makes its own schedule and opens the file.
3. The bytes flow.
4. Rank 0 hears the checksums, writes what needs them, syncs, renames.
"""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastserial.checksums import Piece as Crc
from fastserial.config import Config
from fastserial.distributed.onefile.container import Container
from fastserial.distributed.onefile.finishing import finish_file
from fastserial.distributed.onefile.full_pickle import StandIns
from fastserial.distributed.onefile.laid_out import LaidOut
from fastserial.distributed.onefile.orders import (
    Hello,
    Orders,
    Told,
    Writers,
    orders_of,
    same_orders,
    writing_ranks,
)
from fastserial.distributed.onefile.shard_writer import ShardWriter
from fastserial.distributed.onefile.shared_file import NewFile, OpenedFile, Place
from fastserial.distributed.plan.schedule import FilePlan, Schedule, schedule
from fastserial.distributed.ranks.copies import Copy
from fastserial.distributed.ranks.exchange import Exchange
from fastserial.distributed.ranks.group import Traffic, collective, path_of
from fastserial.distributed.ranks.nodes import node_name
from fastserial.distributed.sharding.pieces import TensorSpec
from fastserial.distributed.state.agreement import Agreement, are_alike, blame
from fastserial.distributed.state.facts import facts_of
from fastserial.distributed.state.merging import merged
from fastserial.distributed.state.tables import (
    Sources,
    Table,
    has_devices,
    synchronize_devices,
    table_of,
)
from fastserial.distributed.state.walk import Leaves, buffers_of, leaves, states
from fastserial.errors import ConfigError, WriteError, write_error
from fastserial.formats.zip.layout import archive_name
from fastserial.interrupts import finish
from fastserial.memory.held_settings import paused_collection
from fastserial.overlap.snapshot import Snapshot
from fastserial.reports import RankReport, SaveReport, publish_save
from fastserial.saving.extent_writer import Outcome

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["TIMEOUT", "Saving", "save"]

TIMEOUT = 600.0  # seconds
# Bytes of one rank's tile, and of the tiles of all ranks in one round.
_TILE = 16 * 1024 * 1024
_TILES = 32 * 1024 * 1024
_SMALLEST_TILE = 64 * 1024


class _Done(NamedTuple):
    """What a rank tells at the end."""

    crcs: list[Crc]
    report: RankReport


@dataclass(slots=True)
class _Kept:
    """What is kept of the last save; nothing of the state itself.

    Attributes:
        name, plan, made: the plan and what this rank does in it.
        keys, specs, firsts: of the sources, see `Table`.
        devices: whether there are tensors on some.
        copies: see `Table`.
        facts: what the plan depends on; None: that is not known.
        stand_ins: on rank 0: what is pickled in the place of tensors.
    """

    name: bytes
    plan: FilePlan
    made: Schedule
    keys: list[str]
    specs: list[TensorSpec]
    firsts: list[int]
    devices: bool
    copies: list[Copy]
    facts: list[Any] | None
    stand_ins: StandIns | None


class _Prepared(NamedTuple):
    """A save up to its first byte."""

    writer: ShardWriter
    kept: _Kept
    orders: Orders
    phases: dict[str, float]


def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    writers: Writers = "all",
    timeout: float = TIMEOUT,
    merge: Literal["union"] | None = None,
) -> SaveReport:
    """Write what `torch.save` of the whole state would write, from all ranks. Collective.

    The file is an ordinary torch file: byte for byte the one that `torch.save` on rank 0 would
    write, had it gathered the full state on the host.

    Args:
        obj: a nest of dicts, lists and tuples of whatever `torch.save` takes, with plain tensors,
            DTensors, FlatShards, modules and optimizers (these with their modules). What is no
            tensor, the buffers of modules, and plain tensors of less than 1 MiB, count as rank 0
            has them; larger plain tensors have to be equal on all ranks (option `compare`). No
            rank may have a key that rank 0 has not.
        path: on a file system that all ranks see. As rank 0 gives it.
        group: the ranks that save; by default all.
        writers: who writes: all ranks, one of each node, or so many.
        timeout: seconds after which a rank that is not heard from counts as lost.
        merge: "union": ranks may have different keys, as the stages of a pipeline do; the file has
            all of them, in the order of the ranks.

    Returns:
        What this rank knows of the save; on rank 0 with a line for each rank.

    Raises:
        DistributedError: any rank failed, all raise it; the previous file is intact, unless a
            rank was lost after the new one took its place. Also if plain tensors differ between
            ranks that would write them together, if a rank has a key that the file would lack, or
            if a tensor is sparse, quantized or otherwise none that `load` could fill.
        Exception: an object cannot be pickled, or a `state_dict()` failed, on this rank.
    """
    began = perf_counter()
    saving: Saving | None = None
    try:
        with collective(group, timeout) as traffic:
            name = path_of(path, obj, "distributed.save(obj, path)")
            saving = Saving(traffic, name, writers, merge, began)
            report = saving.run(obj)
    except BaseException:
        if saving is not None:
            saving.give_up()
        raise
    publish_save(report, saving.config.on_report)
    return report


class Saving:
    """One save."""

    def __init__(
        self, traffic: Traffic, path: str, writers: Writers, merge: str | None, began: float
    ) -> None:
        if merge not in (None, "union"):
            raise ConfigError(f'merge must be None or "union", not {merge!r}')
        self._traffic = traffic
        self.path = path
        self._writers = writers
        self._merge = merge
        self._began = began
        self.config = Config.resolve()
        self._new: NewFile | None = None
        self._opened: OpenedFile | None = None
        self._laid_out: LaidOut | None = None  # on rank 0, as the next two are
        self._stand_ins: StandIns | None = None
        self._container: Container | None = None
        self._hellos: list[Hello] = []
        self._reports: tuple[RankReport, ...] = ()
        kept = traffic.kept.get("save")
        self._kept = kept if isinstance(kept, _Kept) else None

    def run(self, obj: object) -> SaveReport:
        """Save; return what this rank knows of it."""
        self.prepare(obj)
        return self.finish()

    def prepare(self, obj: object) -> Any:
        """Plan the save, and make the new file; return the state. Collective."""
        traffic = self._traffic
        with paused_collection():
            state = states(obj)
            if self._merge == "union":
                state = merged(state, traffic)
            found = leaves(state)
            last = self._kept.facts if self._kept is not None else None
            facts = facts_of(found, traffic.rank == 0, last)
            buffers = buffers_of(obj) if state is not obj else set()
            if facts is not None:
                facts.append(len(buffers))
            orders, kept = self._agreed(state, found, facts, buffers)
            if self._laid_out is not None:
                self._container = Container(self._laid_out)
            if self._new is None:
                self._opened = OpenedFile(orders.place)
        planned = perf_counter()
        traffic.agree()
        phases = {"plan": planned - self._began, "wait": perf_counter() - planned}
        if kept.devices:
            synchronize_devices(found)
        sources = Sources(found.values, kept.keys, kept.specs, kept.firsts, traffic.rank)
        writer = ShardWriter(kept.plan, kept.made, sources, self._container, orders.checksums)
        self._prepared = _Prepared(writer, kept, orders, phases)
        return state

    def freeze(self, taken: Snapshot) -> None:
        """Take what is to be saved as it is now, between `prepare` and `finish`."""
        self._prepared.writer.freeze(taken)

    def finish(self, check: Callable[[], object] | None = None) -> SaveReport:
        """Write; return what this rank knows of the save. Collective.

        Args:
            check: called when this rank has read its bytes; raises if they are not right.
        """
        traffic = self._traffic
        writer, kept, orders, phases = self._prepared
        try:
            done, outcome = self._write(writer, kept.made, orders, phases)
            if check is not None:
                check()
            traffic.consult(pickle.dumps(done), lambda told: self._conclude(told, writer, orders))
        except OSError as error:
            raise self._explained(error) from error
        if self._opened is not None:
            self._opened.close()
        return self._report(orders, done.report, outcome)

    def _agreed(
        self, state: object, found: Leaves, facts: list[Any] | None, buffers: set[int]
    ) -> tuple[Orders, _Kept]:
        """Agree with the other ranks on the plan: the one that all have, or a new one."""
        traffic, kept = self._traffic, self._kept
        if kept is not None and (facts is None or facts != kept.facts):
            kept = None
        if kept is not None:
            kept.facts = facts  # compared faster where the next ones are the same objects
        if kept is not None and kept.stand_ins is not None:
            self._stand_ins = kept.stand_ins
            self._laid_out = self._stand_ins.lay_out(self._archive(), state, found.values)
            if self._file_plan(self._laid_out, kept.plan.writers) != kept.plan:
                kept = None
        hello = Hello(b"", node_name(), None)
        if kept is not None:
            agreement = Agreement(found, kept.copies, traffic, self.config)
            hello = hello._replace(kept=kept.name, likeness=agreement.likeness())
        answer = traffic.consult(pickle.dumps(hello), self._greet)
        if answer and kept is not None:
            orders: Orders = pickle.loads(answer)
            if not orders.agreed:
                agreement.settle()
            return orders, kept
        table = table_of(found, traffic.rank, traffic.ranks, buffers)
        agreement = Agreement(found, table.copies, traffic, self.config, table.odd)
        if traffic.rank == 0 and self._laid_out is None:
            self._stand_ins = StandIns(table)
            self._laid_out = self._stand_ins.lay_out(self._archive(), state, found.values)
        told = Told.of(table, agreement.likeness())
        orders = pickle.loads(traffic.consult(pickle.dumps(told), self._decide))
        if not orders.alike:
            blame(table, traffic)
        if not orders.agreed:
            agreement.settle()
        return orders, self._planned(orders, table, facts)

    def _archive(self) -> str:
        """Return the name that torch puts before the names of the file's records."""
        archive = archive_name(self.path)
        if not archive:
            raise write_error(errno.EINVAL, self.path, "torch cannot save to such a name")
        return archive

    def _greet(self, messages: list[bytes]) -> bytes:
        """Return rank 0's orders if all have its plan still, else nothing."""
        self._hellos = [pickle.loads(text) for text in messages]
        kept, laid_out = self._kept, self._laid_out
        nodes = [hello.node for hello in self._hellos]
        writers = writing_ranks(self._writers, nodes)
        if kept is None or laid_out is None or writers != kept.plan.writers:
            return b""
        if any(hello.kept != kept.name for hello in self._hellos):
            return b""
        agreed = are_alike([hello.likeness for hello in self._hellos if hello.likeness])
        return pickle.dumps(same_orders(kept.name, agreed, nodes, self._make_file(laid_out)))

    @staticmethod
    def _file_plan(laid_out: LaidOut, writers: list[int]) -> FilePlan:
        records, end, _ = laid_out.places
        return FilePlan(end, records, writers)

    def _make_file(self, laid_out: LaidOut) -> Place:
        self._new = NewFile(self.path, self.config)
        return self._new.place(laid_out.places.nbytes)

    def _decide(self, messages: list[bytes]) -> bytes:
        """Return rank 0's orders to all ranks."""
        laid_out = self._laid_out
        if laid_out is None:
            raise ValueError("only rank 0 decides")
        nodes = [hello.node for hello in self._hellos]
        plan = self._file_plan(laid_out, writing_ranks(self._writers, nodes))
        told = [pickle.loads(text) for text in messages]
        return pickle.dumps(orders_of(told, nodes, plan, self._make_file(laid_out)))

    def _planned(self, orders: Orders, table: Table, facts: list[Any] | None) -> _Kept:
        """Return the plan and what this rank does in it."""
        traffic = self._traffic
        if orders.plan is None:
            raise ValueError("rank 0 sent no plan")
        table.complete(orders.ranges, set(orders.misfits), orders.grids)
        last = self._kept
        keys, devices = [source.key for source in table.sources], has_devices(table.leaves)
        if last is not None and last.name == orders.name:
            last.keys, last.firsts, last.devices, last.facts = keys, table.firsts, devices, facts
            last.copies, last.stand_ins = table.copies, self._stand_ins
            return last
        specs = [source.spec for source in table.sources]
        made = schedule(orders.plan, specs, traffic.rank, traffic.size, tile_bytes(traffic.size))
        kept = _Kept(
            *(orders.name, orders.plan, made, keys, specs, table.firsts),
            *(devices, table.copies, facts, self._stand_ins),
        )
        traffic.kept["save"] = kept
        return kept

    def _write(
        self, writer: ShardWriter, made: Schedule, orders: Orders, phases: dict[str, float]
    ) -> tuple[_Done, Outcome]:
        """Write this rank's part; return what rank 0 has to know of it."""
        traffic, opened = self._traffic, self._opened
        exchange = Exchange(traffic)
        fd = opened.fd if opened is not None else self._new.fd if self._new is not None else -1
        outcome = writer.write(fd, self.config, exchange, lambda nbytes: traffic.alive())
        syncing = perf_counter()
        if orders.sync_alone and opened is not None and self.config.durable:
            opened.sync()
        phases |= {**writer.seconds, "sync": perf_counter() - syncing}
        report = RankReport(
            rank=traffic.rank,
            node=node_name(),
            bytes=made.nbytes,
            sent_bytes=exchange.sent_bytes,
            received_bytes=exchange.received_bytes,
            phases=phases,
        )
        return _Done(writer.crcs(), report), outcome

    def _conclude(self, messages: list[bytes], writer: ShardWriter, orders: Orders) -> bytes:
        """Finish the file. On rank 0."""
        done: list[_Done] = [pickle.loads(text) for text in messages]
        self._reports = tuple(found.report for found in done)
        if self._new is None or self._laid_out is None or self._container is None:
            raise ValueError("only rank 0 concludes")
        for found in done[1:]:
            writer.ledger.merge(found.crcs)
        began = perf_counter()
        finish_file(self._new, self._laid_out, self._container, writer, orders.checksums)
        self._reports[0].phases["sync"] += perf_counter() - began
        return b""

    def _report(self, orders: Orders, mine: RankReport, outcome: Outcome) -> SaveReport:
        config, new = self.config, self._new
        return SaveReport(
            path=self.path,
            container="zip",
            bytes=orders.place.nbytes,
            seconds=perf_counter() - self._began,
            engine=outcome.engine,
            direct=outcome.direct,
            durable=new.durable if new is not None else config.durable,
            fallback=(new.fallback if new is not None else None) or outcome.fallback,
            block_size=config.block_size,
            queue_depth=config.queue_depth,
            threads=config.threads,
            phases=self._reports[0].phases if self._reports else mine.phases,
            transfer=outcome.transfer.word,
            transfer_why=outcome.transfer.why,
            ranks=self._reports,
        )

    def _explained(self, error: OSError) -> WriteError:
        if isinstance(error, WriteError):
            return error
        if self._new is not None:
            return self._new.explained(error)
        return write_error(error.errno or errno.EIO, self.path, None)

    def give_up(self) -> None:
        """Remove the new file: whoever is left does it, while it holds the file open.

        So the file of a later save cannot be taken for it.
        """
        steps: list[Callable[[], object]] = []
        if self._new is not None:
            steps.append(self._new.discard)
        if self._opened is not None:
            steps += [self._opened.remove, self._opened.close]
        finish(*steps)


def tile_bytes(size: int) -> int:
    """Return the most bytes of a tile in a group of `size` ranks."""
    return max(_SMALLEST_TILE, min(_TILE, _TILES // size // _SMALLEST_TILE * _SMALLEST_TILE))
