"""Texts of all ranks, of which equal ones travel once.

Mostly all ranks have the same texts: then only digests are sent, joined on the way.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from fastserial.distributed.comm.group import RankGroup

_DIGEST = 16  # bytes
_Runs = list[tuple[int, int]]  # ranks, as first ones and ends


class FromRanks(NamedTuple):
    """A text, and the ranks that have it, in order."""

    text: bytes
    ranks: Sequence[int]


class TextHolders(NamedTuple):
    """Which texts some ranks have.

    Attributes:
        runs: the ranks that have each, by its digest.
        kept: digests of texts that each of these ranks knows from the last time; None: they know
            different ones.
    """

    runs: dict[bytes, _Runs]
    kept: Set[bytes] | None = frozenset()


def gather_distinct(comm: RankGroup, texts: Sequence[bytes], keep: str = "") -> list[FromRanks]:
    """Return the texts of all ranks, each once, on all ranks. Collective.

    They are in the order of the first ranks that have them, and of their texts.

    Args:
        texts: of this rank, each once.
        keep: under this name they are kept for the next time, and not sent again.

    Raises:
        DistributedError: a rank failed, died or was silent for too long.
    """
    mine = {digest_of(text): text for text in texts}
    kept: Any = comm.kept.get(keep, {})
    own = TextHolders({digest: [(comm.rank, comm.rank + 1)] for digest in mine}, set(kept))
    everyone = [(0, comm.size)]

    def decision(found: TextHolders) -> tuple[dict[bytes, _Runs], set[bytes]]:
        known, runs = found.kept or frozenset(), found.runs
        return runs, {one for one, some in runs.items() if some != everyone and one not in known}

    runs, news = comm.reduce_on_root(own, join_holders, decision)
    if news:
        first = {one for one in news if runs[one][0][0] == comm.rank}
        sent = {one: zlib.compress(mine[one], 1) for one in first}
        others: dict[bytes, bytes] = comm.reduce_on_root(sent, join_texts, lambda every: every)
        mine |= {one: zlib.decompress(text) for one, text in others.items() if one not in mine}
    mine = {**kept, **mine}
    if keep:
        comm.kept[keep] = {digest: mine[digest] for digest in runs}
    return [
        FromRanks(mine[digest], [rank for run in some for rank in range(*run)])
        for digest, some in runs.items()
    ]


def digest_of(text: bytes) -> bytes:
    """Return what is compared in place of a text."""
    return hashlib.blake2b(text, digest_size=_DIGEST).digest()


def join_holders(some: Sequence[TextHolders]) -> TextHolders:
    """Return which texts the ranks of several have, in their order."""
    found: dict[bytes, _Runs] = {}
    for one in some:
        for digest, runs in one.runs.items():
            there = found.setdefault(digest, [])
            for first, stop in runs:
                start = there.pop()[0] if there and there[-1][1] == first else first
                there.append((start, stop))
    same = all(one.kept == some[0].kept for one in some)
    return TextHolders(found, some[0].kept if same else None)


def join_texts(some: Sequence[dict[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the texts of several ranks."""
    return {digest: text for texts in some for digest, text in texts.items()}
