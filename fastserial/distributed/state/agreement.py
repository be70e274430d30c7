"""Whether one file can hold what the ranks have.

A tensor that the ranks write together has to be equal on them, and no rank may have an entry that
the file would lack. Every save compares that, by digests in a message that is sent anyway; only if
these differ rank 0 sends its details, and each rank what it has otherwise. No rank is sent what all
the others have: it is joined on the way.
"""

from __future__ import annotations

import hashlib
import marshal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from types import FrameType
from typing import Any, NamedTuple

import torch

from fastserial.config import Config
from fastserial.distributed.comm.group import RankGroup
from fastserial.distributed.comm.replicas import Copies, checksums, join_copies
from fastserial.distributed.layout.placement import Mesh, local_of
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


_TABLE, _REST = "table", "rest"
# What ranks compare at every save: the tables of their states, the rest but for the elements of
# tensors, and these: all tensors that the same ranks have, by a number, and the number of a shard.
Compared = str | tuple[int, int]


class _Details(NamedTuple):
    """What rank 0 sends if the rest differs; see `Agreement`, `Leaves` and `StateTable`."""

    compare: str
    others: list[tuple[str, dict[str, PlainValue]]]
    rows: list[tuple[Any, ...]]


class _Differences(NamedTuple):
    """What some ranks find then.

    Attributes:
        error: the first of them whose state no file can hold with rank 0's, and why.
        values: keys of plain values that are not those of rank 0, with the first ranks.
        sums: of what differs, the checksums of tensors or shards, by the numbers of both.
    """

    error: tuple[int, str] | None
    values: dict[str, Copies]
    sums: dict[tuple[int, int], Copies]


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
        digests: of what is compared.
    """

    def __init__(self, found: Leaves, table: StateTable, comm: RankGroup, config: Config) -> None:
        """Take the checksums of the tensors.

        Args:
            found: the leaves of the state.
            table: of them.
        """
        self._found, self._comm, self._compare = found, comm, config.compare
        self._table = table
        self._known: Any = comm.kept.setdefault("known to differ", set())
        self._kinds: list[int] = []  # see `_replicas`
        mine = dict(self._replicas()) if comm.size > 1 else {}
        sums = checksums(list(mine.values()), config.compare == "all", comm.heartbeat)
        self._sums = dict(zip(mine, sums, strict=True))
        own: Any = self._digest()
        judged: Any = comm.kept.get("judged")
        rest = judged[1] if judged is not None and judged[0] == own else own
        some: dict[Compared, list[int]] = {}
        for (leaf, shard), checksum in self._sums.items():
            some.setdefault((self._kinds[leaf], shard), []).append(checksum)
        digests = {what: _short(sums) for what, sums in some.items()}
        found_here: dict[Compared, bytes] = {_TABLE: table.digest, _REST: rest, **digests}
        self.digests = {what: Copies(one, (comm.rank,)) for what, one in found_here.items()}

    def _digest(self) -> bytes:
        """Return the digest of what is compared besides the table and the tensors' elements."""
        known = self._known
        others = [
            (before, [(key, one) for key, one in some.items() if _counts(before + key, one, known)])
            for before, some in self._found.others
        ]
        return hashlib.sha256(marshal.dumps((self._compare, others), 2)).digest()

    def _replicas(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Yield what this rank has and others should have, too, each with its numbers.

        The tensors of one kind are those of which any rank has the same shards.
        """
        table, values = self._table, self._found.values
        numbers: dict[Any, int] = {}
        shards: dict[int, int | None] = {}
        for leaf, source in enumerate(table.of_leaves):
            held, (*_, placed, ranks) = table.specs[source].held, table.rows[leaf]
            is_sharded = isinstance(held, Mesh)
            about = placed if is_sharded else None, ranks, self._must_be_equal(leaf)
            kind = numbers.setdefault(about, len(numbers))
            self._kinds.append(kind)
            if (value := leaf_of(values[leaf])) is None or self._may_differ(leaf):
                continue
            if leaf in table.copies:
                yield (leaf, 0), value
            elif isinstance(held, Mesh):
                if kind not in shards:
                    shards[kind] = held.shard_of(self._comm.rank, self._comm.size)
                if (shard := shards[kind]) is not None:
                    yield (leaf, shard), local_of(value, self._found.paths[leaf])

    def _may_differ(self, leaf: int) -> bool:
        """Return whether the copies of a tensor are known to differ, and a file has one of them."""
        return self._found.paths[leaf] in self._known and not self._must_be_equal(leaf)

    def raise_if_different(self, differing: Sequence[Compared]) -> None:
        """Raise, or warn on rank 0, now that something is found to differ. Collective.

        Args:
            differing: what does, as rank 0 found it in the digests of all.

        Raises:
            DistributedError: the file would lack something, or mix what different ranks have.
        """
        comm = self._comm
        error, values = None, {}
        if _TABLE in differing or _REST in differing:
            rows = self._table.rows if _TABLE in differing else []
            own = _Details(self._compare, self._found.others, rows)
            first: _Details = comm.reduce_on_root(None, lambda _: None, lambda _: own)
            text = self._difference(first, own)
            error = None if text is None else (comm.rank, text)
            values = {key: Copies(0, (comm.rank,)) for key in self._other_values(first)}
        sums = {
            (leaf, shard): Copies(checksum, (comm.rank,))
            for (leaf, shard), checksum in self._sums.items()
            if (self._kinds[leaf], shard) in differing
        }
        verdict = comm.reduce_on_root(_Differences(error, values, sums), _join, self._judge)
        if verdict.error is not None:
            rank, text = verdict.error
            raise comm.alike(DistributedError(comm.jobs[rank], text))
        self._known.update(verdict.differing)
        comm.kept["judged"] = self._digest(), verdict.digest

    def _judge(self, found: _Differences) -> _Verdict:
        """Return whether a file can hold what there is. On rank 0."""
        if found.error is not None:
            return _Verdict(found.error)
        mixed_up = {numbers: one for numbers, one in found.sums.items() if one.others}
        if mixed := [one for one in mixed_up if self._must_be_equal(one[0])]:
            first = mixed_up[mixed[0]]
            keys = _named(list(dict.fromkeys(self._found.paths[leaf] for leaf, _ in mixed)))
            words = self._comm.in_words
            text = (
                f"tensors that should be equal differ between {words(first.ranks[:1])} and "
                f"{words(first.others)}: {keys}. {_PARTS}"
            )
            return _Verdict((first.others[0], text))
        lost = {self._found.paths[leaf]: one.others for (leaf, _), one in mixed_up.items()}
        self._warn(lost, "tensors differ between the lowest rank", _PARTS)
        values = {key: one.ranks for key, one in found.values.items()}
        self._warn(values, f"values that are not tensors differ between {self._root}", _OWN)
        plain = [key for key in lost if key not in values]
        self._known.update([*plain, *values])
        return _Verdict(None, [*plain, *values], self._digest())

    @property
    def _root(self) -> str:
        return self._comm.in_words([0])

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
        root = self._root
        if (text := difference(first.rows, other.rows, root)) is not None:
            return text
        if other.compare != first.compare:
            return f'its option compare is "{other.compare}", that of {root} "{first.compare}"'
        ours, theirs = _by_key(first), _by_key(other)
        # What is no such dictionary on rank 0 is a value, and values may differ.
        looked_into = {before for before, _ in first.others}
        tensors = set(self._found.paths)  # as on rank 0: the tables are alike
        lacking = [
            before + key
            for before, some in other.others
            if before in looked_into
            for key in some
            if before + key not in ours and before + key not in tensors
        ]
        if lacking:
            return f"it has {_named(lacking)}, which {root} does not have; {_GATHER}"
        for key in ours.keys() & theirs.keys():
            mine, its = ours[key], theirs[key]
            if mine != its and mine is not None and its is not None and mine[0] and its[0]:
                return (
                    f"its {key!r} is {its[1]}, that of {root} {mine[1]}: it must be the same on "
                    f"all ranks. {_OWN}"
                )
        return None

    def _other_values(self, first: _Details) -> list[str]:
        """Return the keys of plain values that are not those of rank 0."""
        ours = _by_key(first)
        return [
            before + key
            for before, some in self._found.others
            for key, value in some.items()
            if value != ours.get(before + key, value) and before + key not in self._known
        ]

    def _warn(self, lost: Mapping[str, Sequence[int]], what: str, remedy: str) -> None:
        """Name keys of which the file has one rank's."""
        if lost:
            ranks = self._comm.in_words(sorted({rank for some in lost.values() for rank in some}))
            text = f"{what}, whose the file has, and {ranks}: {_named(list(lost))}. {remedy}"
            warnings.warn(text, UserWarning, stacklevel=_level_of_caller())


def _short(sums: Sequence[int]) -> bytes:
    """Return a digest of checksums."""
    return hashlib.sha256(marshal.dumps(list(sums), 2)).digest()[:16]


def _join(some: list[_Differences]) -> _Differences:
    """Return what several ranks found as one."""
    return _Differences(
        next((one.error for one in some if one.error is not None), None),
        join_copies([one.values for one in some]),
        join_copies([one.sums for one in some]),
    )


def _counts(key: str, value: PlainValue, known: Set[str]) -> bool:
    """Return whether a value is compared: it must be equal, or is not known to differ."""
    return key not in known or (value is not None and value[0])


def _by_key(details: _Details) -> dict[str, PlainValue]:
    return {before + key: value for before, some in details.others for key, value in some.items()}


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
