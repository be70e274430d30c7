"""Whether one file can hold what the ranks have.

A tensor that the ranks write together has to be equal on them, and no rank may have an entry that
the file would lack. Every save compares that, by digests in a message that is sent anyway; only if
these differ the ranks send the details.
"""

from __future__ import annotations

import hashlib
import marshal
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from fastserial.config import Config
from fastserial.distributed.ranks.call import ranks_in_words
from fastserial.distributed.ranks.copies import checksums, differing
from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.sharding.pieces import Mesh, local_of
from fastserial.distributed.state.merging import leaf_of
from fastserial.distributed.state.tables import StateTable, difference
from fastserial.distributed.state.walk import Leaves
from fastserial.errors import DistributedError

_SHOWN = 5
_PARTS = (
    "Parts of one tensor: save a DTensor or a FlatShard. What should be the same everywhere: "
    "broadcast it from rank 0 first. A tensor for each rank: give each a key of its own, with "
    'distributed.save(…, merge="union")'
)
_GATHER = (
    "what is no tensor counts as rank 0 has it. Gather it there "
    "(torch.distributed.all_gather_object) under a key that all have, or use "
    'distributed.save(…, merge="union")'
)


class _Details(NamedTuple):
    """What a rank sends if something differs; see `Agreement`, `Leaves` and `StateTable`."""

    compare: str
    sums: dict[tuple[int, int], int]
    others: list[tuple[str, list[str]]]
    rows: list[tuple[Any, ...]]


class Agreement:
    """This rank's side of it.

    Attributes:
        sums: a checksum of each tensor or shard that other ranks have, too, by the tensor's
            number among the leaves and the shard's (of a plain tensor 0).
        digest: of all else that is compared.
    """

    def __init__(self, found: Leaves, table: StateTable, traffic: Traffic, config: Config) -> None:
        """Take the checksums of the tensors.

        Args:
            found: the leaves of the state.
            table: of them.
        """
        self._found, self._traffic, self._compare = found, traffic, config.compare
        self._table = table
        mine = dict(self._replicas()) if traffic.size > 1 else {}
        sums = checksums(list(mine.values()), config.compare == "all", traffic.alive)
        self.sums = dict(zip(mine, sums, strict=True))
        keys = marshal.dumps((config.compare, found.others), 2)
        self.digest = hashlib.sha256(table.digest + keys).digest()

    def _replicas(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Yield what this rank has and others should have, too, each with its numbers."""
        table, values = self._table, self._found.values
        for number in table.copies:
            if (leaf := leaf_of(values[number])) is not None:
                yield (number, 0), leaf
        for number, source in enumerate(table.of_leaves):
            held, leaf = table.specs[source].held, leaf_of(values[number])
            if not isinstance(held, Mesh) or leaf is None:
                continue
            shard = held.shard_of(self._traffic.rank, self._traffic.size)
            if shard is not None:
                yield (number, shard), local_of(leaf, self._found.paths[number])

    def settle(self) -> None:
        """Raise, or warn on rank 0, now that something is known to differ. Collective.

        Raises:
            DistributedError: the file would lack something, or mix what different ranks have.
        """
        mine = _Details(self._compare, self.sums, self._found.others, self._table.rows)
        answer = self._traffic.decide(mine, self._judge)
        if answer:  # all raise it alike, and the connections stay as they are
            raise DistributedError(*answer)

    def _judge(self, found: list[_Details]) -> tuple[int, str] | None:
        """Return the first rank that differs, and how; None if a file can hold what there is."""
        for rank, one in enumerate(found):
            if (text := difference(found[0].rows, one.rows)) is not None:
                return rank, text
        for rank, one in enumerate(found):
            if one.compare != found[0].compare:
                text = f'its option compare is "{one.compare}", that of rank 0 "{found[0].compare}"'
                return rank, text
        ours = {before + key for before, keys in found[0].others for key in keys}
        ours.update(self._found.paths)
        # What is no such dictionary on rank 0 is a value, and values may differ.
        looked_into = {before for before, _ in found[0].others}
        for rank, one in enumerate(found):
            theirs = [
                before + key for before, keys in one.others if before in looked_into for key in keys
            ]
            lacking = [key for key in theirs if key not in ours]
            if lacking:
                text = f"it has {_named(lacking)}, which rank 0 does not have; {_GATHER}"
                return rank, text
        mixed_up = differing([one.sums for one in found])
        # The replicas of a DTensor are divided only where all their bytes were compared.
        if mixed := [
            one for one in mixed_up if self._table.copies.get(one[0], self._compare == "all")
        ]:
            ranks = mixed_up[mixed[0]]
            first = next(rank for rank, one in enumerate(found) if mixed[0] in one.sums)
            keys = _named(list(dict.fromkeys(self._found.paths[leaf] for leaf, _ in mixed)))
            text = (
                f"tensors that should be equal differ between rank {first} and "
                f"{ranks_in_words(ranks)}: {keys}. {_PARTS}"
            )
            return ranks[0], text
        self._warn({self._found.paths[leaf]: ranks for (leaf, _), ranks in mixed_up.items()})
        return None

    def _warn(self, lost: dict[str, list[int]]) -> None:
        """Name, once in a job, the small tensors of which the file has one rank's."""
        known: Any = self._traffic.kept.setdefault("warned", set())
        new = [key for key in lost if key not in known]
        known.update(new)
        if new:
            ranks = ranks_in_words(sorted({rank for key in new for rank in lost[key]}))
            text = (
                f"tensors differ between the lowest rank, whose values the file has, and "
                f"{ranks}: {_named(new)}. {_PARTS}"
            )
            warnings.warn(text, UserWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """Return the `stacklevel` of the user's call, for who calls this function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "fastserial"


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(map(repr, keys[:_SHOWN])) + more
