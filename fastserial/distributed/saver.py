"""`save`: every rank writes a part of one ordinary file, and no rank holds the whole.

1. Each rank makes the table of its state. Rank 0 lays the file out over memory that is never
   touched, and makes the new file.
2. Rank 0 hears all digests. If they are alike, and nothing changed since the last save, that is
   all; else it sends the places of the records. Each rank makes its own schedule and opens the
   file.
3. The bytes flow.
4. Rank 0 hears the checksums, writes what needs them, syncs, renames.
"""

from __future__ import annotations

import hashlib
import logging
import marshal
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastserial.checksums import Piece as Crc
from fastserial.config import Config
from fastserial.distributed import merging
from fastserial.distributed.container import Container
from fastserial.distributed.exchange import Exchange
from fastserial.distributed.finishing import finish_file
from fastserial.distributed.full_pickle import full_pickle
from fastserial.distributed.group import Traffic, traffic_of
from fastserial.distributed.nodes import node_name
from fastserial.distributed.schedule import FilePlan, Schedule, schedule
from fastserial.distributed.shard_writer import Head, ShardWriter
from fastserial.distributed.shared_file import NewFile, OpenedFile, Place
from fastserial.distributed.tables import Table, difference, table_of
from fastserial.distributed.walk import states
from fastserial.errors import WriteError, write_error
from fastserial.formats.zip.layout import archive_name
from fastserial.interrupts import finish
from fastserial.reports import RankReport, SaveReport, publish_save
from fastserial.saving import torch_writer

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["TIMEOUT", "save"]

Writers = Literal["all", "node"] | int
TIMEOUT = 600.0  # seconds
# Bytes of one rank's tile, and of the tiles of all ranks in one round.
_TILE = 16 * 1024 * 1024
_TILES = 32 * 1024 * 1024
_SMALLEST_TILE = 64 * 1024
_log = logging.getLogger("fastserial")


class _Hello(NamedTuple):
    """What a rank tells rank 0 first."""

    digest: bytes
    ranges: list[tuple[int, int, int]]
    misfits: list[int]
    grids: list[tuple[tuple[int, ...], ...]]
    kept: bytes
    node: str


class _Orders(NamedTuple):
    """What rank 0 answers."""

    kept: bool
    plan: FilePlan | None
    ranges: dict[int, list[tuple[int, int, int]]]
    misfits: list[int]
    grids: list[tuple[tuple[int, ...], ...]]
    place: Place
    checksums: bool
    sync_alone: bool  # the ranks are on several nodes: each syncs what it wrote
    alike: bool  # False: the ranks' states differ, and all tell theirs


class _Done(NamedTuple):
    """What a rank tells at the end."""

    crcs: list[Crc]
    heads: list[Head]
    sealed: set[int]
    report: RankReport


@dataclass(slots=True)
class _Kept:
    """The plan of the last save."""

    name: bytes = b""
    file: bytes = b""
    plan: FilePlan | None = None
    made: Schedule = field(default_factory=Schedule)
    specs: list[Any] = field(default_factory=list)


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
            tensor, and tensors of less than 1 MiB, count as rank 0 has them; larger plain tensors
            have to be equal on all ranks.
        path: on a file system that all ranks see. As rank 0 gives it.
        group: the ranks that save; by default all.
        writers: who writes: all ranks, one of each node, or so many.
        timeout: seconds after which a rank that is not heard from counts as lost.
        merge: "union": ranks may have different keys, as the stages of a pipeline do; the file has
            all of them, in the order of the ranks.

    Returns:
        What this rank knows of the save; on rank 0 with a line for each rank.

    Raises:
        DistributedError: any rank failed, all raise it; the previous file is intact.
    """
    began = perf_counter()
    if merge not in (None, "union"):
        raise ValueError(f'merge must be None or "union", not {merge!r}')
    traffic = traffic_of(group, timeout)
    saving = _Saving(traffic, os.fspath(path), writers, merge, began)
    try:
        with traffic.together():
            report = saving.run(obj)
    except BaseException:
        saving.give_up()
        raise
    publish_save(report)
    _log.debug("%s", report)
    return report


class _Saving:
    """One save."""

    def __init__(
        self, traffic: Traffic, path: str, writers: Writers, merge: str | None, began: float
    ) -> None:
        self._traffic = traffic
        self._path = path
        self._writers = writers
        self._merge = merge
        self._began = began
        self._config = Config.resolve()
        self._new: NewFile | None = None
        self._opened: OpenedFile | None = None
        kept = traffic.kept.get("save")
        self._kept = kept if isinstance(kept, _Kept) else _Kept()

    def run(self, obj: object) -> SaveReport:
        traffic = self._traffic
        state = states(obj)
        if self._merge == "union":
            state = merging.merged(state, traffic)
        table = table_of(state, traffic.rank, traffic.ranks)
        container, sealing = None, None
        if traffic.rank == 0:
            archive = archive_name(self._path)
            if not archive:
                raise write_error(22, self._path, "torch cannot save to a name such as this")
            pickled = full_pickle(state, archive, table)
            container = Container(pickled)
            self._new = NewFile(self._path, self._config)
            place = self._new.reserve(pickled.plan.nbytes)
            sealing = pickled
            records = pickled.records

        def decide(messages: list[bytes]) -> bytes:
            hellos = [pickle.loads(text) for text in messages]
            return self._decide(hellos, records, container, place)

        hello = _Hello(
            table.digest(), table.ranges(), table.misfits, table.grids, self._kept.name, node_name()
        )
        orders: _Orders = pickle.loads(traffic.consult(pickle.dumps(hello), decide))
        if not orders.alike:
            traffic.consult(marshal.dumps(table.rows, 2), self._blame)
        plan, made = self._plan(orders, table)
        if self._new is None:
            self._opened = OpenedFile(orders.place)
        planned = perf_counter()
        traffic.agree()
        agreed = perf_counter()

        exchange = Exchange(traffic)
        writer = ShardWriter(plan, made, table.sources, container, orders.checksums)
        fd = self._new.fd if self._new is not None else self._opened.fd if self._opened else -1
        try:
            out = writer.write(fd, self._config, exchange, lambda nbytes: traffic.alive())
            syncing = perf_counter()
            if orders.sync_alone and self._opened is not None and self._config.durable:
                self._opened.sync()
        except OSError as error:
            raise self._explained(error) from error
        mine = RankReport(
            rank=traffic.rank,
            node=node_name(),
            bytes=made.nbytes,
            sent_bytes=exchange.sent_bytes,
            received_bytes=exchange.received_bytes,
            phases={
                "plan": planned - self._began,
                "wait": agreed - planned,
                **writer.seconds,
                "sync": perf_counter() - syncing,
            },
        )
        reports: list[RankReport] = []

        def conclude(messages: list[bytes]) -> bytes:
            done = [pickle.loads(text) for text in messages]
            reports.extend(found.report for found in done)
            if self._new is not None and sealing is not None and container is not None:
                for found in done:
                    if found.report.rank != 0:
                        writer.ledger.merge(found.crcs)
                heads = [head for found in done for head in found.heads]
                finish_file(self._new, sealing, container, writer, heads, orders.checksums)
            return b""

        done = _Done(writer.crcs(), writer.heads, writer.sealed, mine)
        try:
            traffic.consult(pickle.dumps(done), conclude)
        except OSError as error:
            raise self._explained(error) from error
        self._close()
        durable = self._new.durable if self._new is not None else self._config.durable
        return SaveReport(
            path=self._path,
            container="zip",
            bytes=orders.place.nbytes,
            seconds=perf_counter() - self._began,
            engine=out.engine_name,
            direct=out.direct,
            durable=durable,
            fallback=(self._new.fallback if self._new is not None else None) or out.fallback,
            block_size=self._config.block_size,
            queue_depth=self._config.queue_depth,
            threads=self._config.threads,
            phases=mine.phases,
            ranks=tuple(reports),
        )

    def _decide(
        self,
        hellos: list[_Hello],
        records: list[tuple[int, int, int, int]],
        container: Container | None,
        place: Place,
    ) -> bytes:
        """Return rank 0's orders to all ranks."""
        ranges: dict[int, list[tuple[int, int, int]]] = {}
        for rank, hello in enumerate(hellos):
            for source, first, stop in hello.ranges:
                ranges.setdefault(source, []).append((rank, first, stop))
        misfits = sorted({source for hello in hellos for source in hello.misfits})
        grids = [
            tuple(sorted({grid for several in found for grid in several}))
            for found in zip(*(hello.grids for hello in hellos), strict=False)
        ]
        end = container.end if container is not None else 0
        plan = FilePlan(end, records, self._chosen(hellos))
        checksums = torch_writer.checksums_wanted()
        name = hashlib.sha256(
            marshal.dumps(
                (tuple(plan), sorted(ranges.items()), misfits, grids, hellos[0].digest), 2
            )
        ).digest()
        same = all(hello.kept == name for hello in hellos)
        nodes = len({hello.node for hello in hellos})
        orders = _Orders(
            same,
            None if same else plan,
            {} if same else ranges,
            [] if same else misfits,
            [] if same else grids,
            place,
            checksums,
            nodes > 1,
            len({hello.digest for hello in hellos}) == 1,
        )
        return pickle.dumps(orders)

    def _plan(self, orders: _Orders, table: Table) -> tuple[FilePlan, Schedule]:
        """Return the plan and what this rank does; those kept if nothing changed."""
        kept, traffic = self._kept, self._traffic
        if orders.kept and kept.plan is not None:
            for source, spec in zip(table.sources, kept.specs, strict=True):
                source.spec = spec
            return kept.plan, kept.made
        if orders.plan is None:
            raise ValueError("rank 0 sent no plan")
        plan = orders.plan
        table.complete(orders.ranges, set(orders.misfits), orders.grids)
        specs = [source.spec for source in table.sources]
        made = schedule(plan, specs, traffic.rank, traffic.size, _tile_bytes(traffic.size))
        told = sorted(orders.ranges.items()), orders.misfits, orders.grids, table.digest()
        name = hashlib.sha256(marshal.dumps((tuple(plan), *told), 2)).digest()
        traffic.kept["save"] = _Kept(name, b"", plan, made, specs)
        return plan, made

    def _chosen(self, hellos: Sequence[_Hello]) -> list[int]:
        """Return the ranks that write."""
        if torch_writer.alignment() % 16:
            return [0]  # elements would lie across the ranks' borders
        if self._writers == "all":
            return list(range(len(hellos)))
        if self._writers == "node":
            first: dict[str, int] = {}
            for rank, hello in enumerate(hellos):
                first.setdefault(hello.node, rank)
            return sorted(first.values())
        if not isinstance(self._writers, int) or self._writers < 1:
            raise ValueError(f'writers must be "all", "node" or a number, not {self._writers!r}')
        count = min(self._writers, len(hellos))
        return sorted({index * len(hellos) // count for index in range(count)})

    def _blame(self, messages: list[bytes]) -> bytes:
        """Say which rank's state differs from rank 0's, and where."""
        tables = [marshal.loads(text) for text in messages]
        for rank, rows in enumerate(tables):
            found = difference(tables[0], rows)
            if found is not None:
                raise self._traffic.fail(rank, found)
        return b""

    def _explained(self, error: OSError) -> WriteError:
        if isinstance(error, WriteError):
            return error
        if self._new is not None:
            return self._new.explained(error)
        return write_error(error.errno or 5, self._path, None)

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def give_up(self) -> None:
        """Remove the new file."""
        steps: list[Callable[[], object]] = []
        if self._new is not None:
            steps.append(self._new.discard)
        if self._opened is not None:
            steps += [self._opened.remove, self._opened.close]
        finish(*steps)


def _tile_bytes(size: int) -> int:
    return max(_SMALLEST_TILE, min(_TILE, _TILES // size // _SMALLEST_TILE * _SMALLEST_TILE))
