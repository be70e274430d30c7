"""What the ranks tell rank 0 before a save, and what it tells them."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fastserial.distributed.schedule import FilePlan
from fastserial.distributed.shared_file import Place
from fastserial.distributed.tables import Table
from fastserial.saving import torch_writer

__all__ = ["Hello", "Orders", "Writers", "orders_of"]

Writers = Literal["all", "node"] | int
Ranges = dict[int, list[tuple[int, int, int]]]


class Hello(NamedTuple):
    """What a rank tells.

    Attributes:
        digest, ranges, misfits, grids: of its `Table`.
        kept: name of the plan that it has from its last save.
        node: what tells the nodes apart.
    """

    digest: bytes
    ranges: list[tuple[int, int, int]]
    misfits: list[int]
    grids: list[tuple[tuple[int, ...], ...]]
    kept: bytes
    node: str

    @staticmethod
    def of(table: Table, kept: bytes, node: str) -> Hello:
        """Return what a rank with this table tells."""
        return Hello(table.digest(), table.ranges(), table.misfits, table.grids, kept, node)


class Orders(NamedTuple):
    """What rank 0 answers.

    Attributes:
        alike: False: the ranks' states differ, and all tell theirs.
        name: of the plan.
        plan: None: the one that all have from the last save; then the next three are empty.
        ranges: of each FlatShard: rank, first element, end.
        misfits, grids: see `Table`; of all ranks.
        place: of the new file.
        checksums: whether the file has CRC-32s.
        sync_alone: the ranks are on several nodes: each syncs what it wrote.
    """

    alike: bool
    name: bytes
    plan: FilePlan | None
    ranges: Ranges
    misfits: list[int]
    grids: list[tuple[tuple[int, ...], ...]]
    place: Place
    checksums: bool
    sync_alone: bool


def orders_of(
    hellos: Sequence[Hello],
    end: int,
    records: list[tuple[int, int, int, int]],
    writers: Writers,
    place: Place,
) -> Orders:
    """Return rank 0's answer.

    Args:
        hellos: of all ranks.
        end, records: of the plan (`FilePlan`).
        writers: as the user wants them.
        place: of the new file.

    Raises:
        ValueError: no such writers.
    """
    ranges: Ranges = {}
    for rank, hello in enumerate(hellos):
        for source, first, stop in hello.ranges:
            ranges.setdefault(source, []).append((rank, first, stop))
    misfits = sorted({source for hello in hellos for source in hello.misfits})
    grids = [
        tuple(sorted({grid for several in found for grid in several}))
        for found in zip(*(hello.grids for hello in hellos), strict=False)
    ]
    plan = FilePlan(end, records, _chosen(writers, [hello.node for hello in hellos]))
    whole: Any = (tuple(plan), sorted(ranges.items()), misfits, grids, hellos[0].digest)
    name = hashlib.sha256(marshal.dumps(whole, 2)).digest()
    alike = all(hello.digest == hellos[0].digest for hello in hellos)
    several = len({hello.node for hello in hellos}) > 1
    checksums = torch_writer.checksums_wanted()
    if all(hello.kept == name for hello in hellos):
        return Orders(alike, name, None, {}, [], [], place, checksums, several)
    return Orders(alike, name, plan, ranges, misfits, grids, place, checksums, several)


def _chosen(writers: Writers, nodes: Sequence[str]) -> list[int]:
    """Return the ranks that write."""
    size = len(nodes)
    if torch_writer.alignment() % 16:
        return [0]  # elements would lie across the borders between ranks
    if writers == "all":
        return list(range(size))
    if writers == "node":
        return sorted({nodes.index(node) for node in nodes})
    if not isinstance(writers, int) or writers < 1:
        raise ValueError(f'writers must be "all", "node" or a number, not {writers!r}')
    count = min(writers, size)
    return [index * size // count for index in range(count)]
