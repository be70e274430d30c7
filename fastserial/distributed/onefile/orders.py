"""What the ranks tell rank 0 before a save, and what it tells them."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fastserial.distributed.onefile.shared_file import Place
from fastserial.distributed.plan.schedule import FilePlan
from fastserial.distributed.state.agreement import Likeness, are_alike
from fastserial.distributed.state.tables import Grids
from fastserial.errors import ConfigError
from fastserial.saving import torch_writer

__all__ = ["Orders", "Told", "Writers", "orders_of", "writing_ranks"]

Writers = Literal["all", "node"] | int
Ranges = dict[int, list[tuple[int, int, int]]]


class Told(NamedTuple):
    """What a rank tells of its state.

    Attributes:
        node: what tells the nodes apart.
        kept: name of the plan of its last save, b"" if there is none.
        digest, ranges, grids: of its `Table`.
        likeness: see `Agreement`.
    """

    node: str
    kept: bytes
    digest: bytes
    ranges: list[tuple[int, int, int]]
    grids: list[Grids]
    likeness: Likeness


class Orders(NamedTuple):
    """What rank 0 answers.

    Attributes:
        alike: False: the ranks' tables differ, and all tell theirs.
        agreed: False: what else is compared differs (`Agreement`), and all tell theirs.
        name: of the plan.
        plan: None: the one that all have from the last save; then the next two are empty.
        ranges: of each FlatShard: rank, first element, end.
        grids: see `Table`; of all ranks.
        place: of the new file.
        checksums: whether the file has CRC-32s.
        sync_alone: the ranks are on several nodes: each syncs what it wrote.
    """

    alike: bool
    agreed: bool
    name: bytes
    plan: FilePlan | None
    ranges: Ranges
    grids: list[Grids]
    place: Place
    checksums: bool
    sync_alone: bool


def orders_of(told: Sequence[Told], plan: FilePlan, place: Place) -> Orders:
    """Return rank 0's answer.

    Args:
        told: by all ranks.
        plan, place: of the new file.
    """
    ranges: Ranges = {}
    for rank, one in enumerate(told):
        for source, first, stop in one.ranges:
            ranges.setdefault(source, []).append((rank, first, stop))
    grids = [
        tuple(sorted({grid for several in found for grid in several}))
        for found in zip(*(one.grids for one in told), strict=False)
    ]
    whole: Any = (tuple(plan), sorted(ranges.items()), grids, told[0].digest)
    name = hashlib.sha256(marshal.dumps(whole, 2)).digest()
    kept = all(one.kept == name for one in told)
    return Orders(
        alike=all(one.digest == told[0].digest for one in told),
        agreed=are_alike([one.likeness for one in told]),
        name=name,
        plan=None if kept else plan,
        ranges={} if kept else ranges,
        grids=[] if kept else grids,
        place=place,
        checksums=torch_writer.checksums_wanted(),
        sync_alone=len({one.node for one in told}) > 1,
    )


def writing_ranks(writers: Writers, nodes: Sequence[str]) -> list[int]:
    """Return the ranks that write.

    Args:
        writers: as the user wants them.
        nodes: of all ranks.

    Raises:
        ConfigError: torch's storage alignment is no multiple of 16 bytes, with several ranks.
        ValueError: no such writers.
    """
    size = len(nodes)
    alignment = torch_writer.alignment()
    if alignment % 16 and size > 1:
        raise ConfigError(
            f"with torch's storage alignment of {alignment} bytes elements would lie across the "
            "borders between ranks: many ranks need a multiple of 16"
        )
    if writers == "all":
        return list(range(size))
    if writers == "node":
        return sorted({nodes.index(node) for node in nodes})
    if not isinstance(writers, int) or writers < 1:
        raise ValueError(f'writers must be "all", "node" or a number, not {writers!r}')
    count = min(writers, size)
    return [index * size // count for index in range(count)]
