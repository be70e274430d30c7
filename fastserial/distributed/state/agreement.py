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
from collections.abc import Iterator, Sequence, Set
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
from fastserial.distributed.state.walk import Leaves, PlainValue
from fastserial.errors import DistributedError

_SHOWN = 5
_PARTS = (
    "Parts of one tensor: save a DTensor or a FlatShard. What should be the same everywhere: "
    "broadcast it from rank 0 first. A tensor for each rank: give each a key of its own, with "
    'distributed.save(…, merge="union")'
)
_OWN = (
    "What each rank has of its own: per_rank of Checkpointer, or a key for each rank, with "
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
    others: list[tuple[str, dict[str, PlainValue]]]
    rows: list[tuple[Any, ...]]


class _Verdict(NamedTuple):
    """What rank 0 answers.

    Attributes:
        error: the first rank that differs, and how; None: a file can hold what there is.
        differing: keys of small tensors and values of which the file has one rank's.
        digest: of rank 0, without these.
    """

    error: tuple[int, str] | None
    differing: list[str] = []  # noqa: RUF012 (never changed)
    digest: bytes = b""


class Agreement:
    """This rank's side of it.

    What was found to differ, and may, is not compared again in later saves of the group; nor are
    the digests of a rank that were found to go together with those of rank 0.

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
        self._known: Any = traffic.kept.setdefault("known to differ", set())
        mine = dict(self._replicas()) if traffic.size > 1 else {}
        sums = checksums(list(mine.values()), config.compare == "all", traffic.alive)
        self.sums = dict(zip(mine, sums, strict=True))
        own: Any = self._digest()
        judged: Any = traffic.kept.get("judged")
        self.digest = judged[1] if judged is not None and judged[0] == own else own

    def _digest(self) -> bytes:
        """Return the digest of what is compared besides the tensors' elements."""
        known = self._known
        others = [
            (before, [(key, one) for key, one in some.items() if _counts(before + key, one, known)])
            for before, some in self._found.others
        ]
        keys = marshal.dumps((self._compare, others), 2)
        return hashlib.sha256(self._table.digest + keys).digest()

    def _replicas(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Yield what this rank has and others should have, too, each with its numbers."""
        table, values = self._table, self._found.values
        for number in table.copies:
            if (leaf := leaf_of(values[number])) is not None and not self._may_differ(number):
                yield (number, 0), leaf
        for number, source in enumerate(table.of_leaves):
            held, leaf = table.specs[source].held, leaf_of(values[number])
            if not isinstance(held, Mesh) or leaf is None or self._may_differ(number):
                continue
            shard = held.shard_of(self._traffic.rank, self._traffic.size)
            if shard is not None:
                yield (number, shard), local_of(leaf, self._found.paths[number])

    def _may_differ(self, leaf: int) -> bool:
        """Return whether the copies of a tensor are known to differ, and a file has one of them."""
        return self._found.paths[leaf] in self._known and not self._must_be_equal(leaf)

    def settle(self) -> None:
        """Raise, or warn on rank 0, now that something is found to differ. Collective.

        Raises:
            DistributedError: the file would lack something, or mix what different ranks have.
        """
        mine = _Details(self._compare, self.sums, self._found.others, self._table.rows)
        verdict = self._traffic.decide(mine, self._judge)
        if verdict.error is not None:  # all raise it alike, and the connections stay as they are
            raise DistributedError(*verdict.error)
        self._known.update(verdict.differing)
        self._traffic.kept["judged"] = self._digest(), verdict.digest

    def _judge(self, found: list[_Details]) -> _Verdict:
        """Return whether a file can hold what there is. On rank 0."""
        for rank, one in enumerate(found):
            if (text := self._difference(found[0], one)) is not None:
                return _Verdict((rank, text))
        mixed_up = differing([one.sums for one in found])
        if mixed := [one for one in mixed_up if self._must_be_equal(one[0])]:
            ranks = mixed_up[mixed[0]]
            first = next(rank for rank, one in enumerate(found) if mixed[0] in one.sums)
            keys = _named(list(dict.fromkeys(self._found.paths[leaf] for leaf, _ in mixed)))
            text = (
                f"tensors that should be equal differ between rank {first} and "
                f"{ranks_in_words(ranks)}: {keys}. {_PARTS}"
            )
            return _Verdict((ranks[0], text))
        lost = {self._found.paths[leaf]: ranks for (leaf, _), ranks in mixed_up.items()}
        _warn(lost, "tensors differ between the lowest rank", _PARTS)
        values = self._differing_values(found)
        _warn(values, "values that are not tensors differ between rank 0", _OWN)
        plain = [key for key in lost if key not in values]
        self._known.update([*plain, *values])
        return _Verdict(None, [*plain, *values], self._digest())

    def _must_be_equal(self, leaf: int) -> bool:
        """Return whether it is an error if the copies of a tensor differ.

        The replicas of a DTensor are divided only where all their bytes were compared.
        """
        shared = self._table.copies.get(leaf)
        if shared is None:
            return self._compare == "all"
        return shared or leaf in self._found.of_optimizers

    def _difference(self, first: _Details, other: _Details) -> str | None:
        """Return in words why a file cannot hold what rank 0 and another rank have, or None."""
        if (text := difference(first.rows, other.rows)) is not None:
            return text
        if other.compare != first.compare:
            return f'its option compare is "{other.compare}", that of rank 0 "{first.compare}"'
        ours, theirs = _by_key(first), _by_key(other)
        # What is no such dictionary on rank 0 is a value, and values may differ.
        looked_into = {before for before, _ in first.others}
        lacking = [
            before + key
            for before, some in other.others
            if before in looked_into
            for key in some
            if before + key not in ours and before + key not in self._found.paths
        ]
        if lacking:
            return f"it has {_named(lacking)}, which rank 0 does not have; {_GATHER}"
        for key in ours.keys() & theirs.keys():
            mine, its = ours[key], theirs[key]
            if mine != its and mine is not None and its is not None and mine[0] and its[0]:
                return (
                    f"its {key!r} is {its[1]}, that of rank 0 {mine[1]}: it must be the same on "
                    f"all ranks. {_OWN}"
                )
        return None

    def _differing_values(self, found: list[_Details]) -> dict[str, list[int]]:
        """Return the keys of plain values that are not those of rank 0, with their ranks."""
        ours = _by_key(found[0])
        lost: dict[str, list[int]] = {}
        for rank, one in enumerate(found):
            for key, value in _by_key(one).items():
                if value != ours.get(key, value) and key not in self._known:
                    lost.setdefault(key, []).append(rank)
        return lost


def _counts(key: str, value: PlainValue, known: Set[str]) -> bool:
    """Return whether a value is compared: it must be equal, or is not known to differ."""
    return key not in known or (value is not None and value[0])


def _by_key(details: _Details) -> dict[str, PlainValue]:
    return {before + key: value for before, some in details.others for key, value in some.items()}


def _warn(lost: dict[str, list[int]], what: str, remedy: str) -> None:
    """Name keys of which the file has one rank's."""
    if lost:
        ranks = ranks_in_words(sorted({rank for some in lost.values() for rank in some}))
        text = f"{what}, whose the file has, and {ranks}: {_named(list(lost))}. {remedy}"
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
