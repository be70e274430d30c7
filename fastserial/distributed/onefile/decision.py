"""What rank 0 decides before a save, from what the ranks say of their states."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fastserial.distributed.onefile.shared_file import FileIdentity
from fastserial.distributed.plan.schedule import FilePlan
from fastserial.distributed.ranks.copies import differing
from fastserial.distributed.state.tables import Grids
from fastserial.errors import ConfigError
from fastserial.saving import torch_writer

__all__ = ["SaveDecision", "StateSummary", "Writers", "decided", "writing_ranks"]

Writers = Literal["all", "node"] | int
Ranges = dict[int, list[tuple[int, int, int]]]


class StateSummary(NamedTuple):
    """What a rank says of its state.

    Attributes:
        node: what tells the nodes apart.
        kept: name of the plan of its last save, b"" if there is none.
        ranges, grids: of its `Table`.
        digest, sums: see `Agreement`.
    """

    node: str
    kept: bytes
    ranges: list[tuple[int, int, int]]
    grids: list[Grids]
    digest: bytes
    sums: dict[int, int]


class SaveDecision(NamedTuple):
    """What rank 0 decides.

    Attributes:
        agreed: False: what is compared differs, and all ranks send the details (`Agreement`).
        name: of the plan.
        plan: None: the one that all have from the last save; then the next two are empty.
        ranges: of each FlatShard: rank, first element, end.
        grids: see `Table`; of all ranks.
        place: of the new file.
        sync_alone: the ranks are on several nodes: each syncs what it wrote.
    """

    agreed: bool
    name: bytes
    plan: FilePlan | None
    ranges: Ranges
    grids: list[Grids]
    place: FileIdentity
    sync_alone: bool


def decided(found: Sequence[StateSummary], plan: FilePlan, place: FileIdentity) -> SaveDecision:
    """Return rank 0's decision.

    Args:
        found: of all ranks.
        plan, place: of the new file.
    """
    ranges: Ranges = {}
    for rank, one in enumerate(found):
        for source, first, stop in one.ranges:
            ranges.setdefault(source, []).append((rank, first, stop))
    grids = [
        tuple(sorted({grid for several in some for grid in several}))
        for some in zip(*(one.grids for one in found), strict=False)
    ]
    whole: Any = (tuple(plan), sorted(ranges.items()), grids, found[0].digest)
    name = hashlib.sha256(marshal.dumps(whole, 2)).digest()
    kept = all(one.kept == name for one in found)
    sums = [one.sums for one in found]
    return SaveDecision(
        agreed=all(one.digest == found[0].digest for one in found)
        and (all(one == sums[0] for one in sums) or not differing(sums)),
        name=name,
        plan=None if kept else plan,
        ranges={} if kept else ranges,
        grids=[] if kept else grids,
        place=place,
        sync_alone=len({one.node for one in found}) > 1,
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
