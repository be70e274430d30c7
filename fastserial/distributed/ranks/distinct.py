"""Texts of all ranks, of which equal ones travel once.

Mostly all ranks have the same texts: then only digests are sent.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.sharding.boxes import runs_of

_DIGEST = 16  # bytes


class FromRanks(NamedTuple):
    """A text, and the ranks that have it, in order."""

    text: bytes
    ranks: Sequence[int]


class _Holders(NamedTuple):
    """Ranks that have a text, as first ones and ends; None: all of them."""

    digest: bytes
    runs: list[tuple[int, int]] | None


def gather_distinct(traffic: Traffic, texts: Sequence[bytes]) -> list[FromRanks]:
    """Return the texts of all ranks, each once, on all ranks. Collective.

    They are in the order of the first ranks that have them, and of their texts.

    Args:
        texts: of this rank, each once.

    Raises:
        DistributedError: a rank failed, died or was silent for too long.
    """
    mine = {digest_of(text): text for text in texts}
    found: list[_Holders] = traffic.decide(list(mine), _holders)
    if any(one.runs is not None for one in found):
        first = {one.digest for one in found if one.runs and one.runs[0][0] == traffic.rank}
        sent = {digest: zlib.compress(text, 1) for digest, text in mine.items() if digest in first}
        others: dict[bytes, bytes] = traffic.decide(sent, _joined)
        mine |= {
            digest: zlib.decompress(text) for digest, text in others.items() if digest not in mine
        }
    everyone = [(0, traffic.size)]
    return [
        FromRanks(mine[digest], [rank for run in runs or everyone for rank in range(*run)])
        for digest, runs in found
    ]


def digest_of(text: bytes) -> bytes:
    """Return what is compared in place of a text."""
    return hashlib.blake2b(text, digest_size=_DIGEST).digest()


def _holders(every: Sequence[Sequence[bytes]]) -> list[_Holders]:
    ranks: dict[bytes, list[int]] = {}
    for rank, digests in enumerate(every):
        for digest in digests:
            ranks.setdefault(digest, []).append(rank)
    return [
        _Holders(digest, None if len(some) == len(every) else runs_of(some))
        for digest, some in ranks.items()
    ]


def _joined(every: Sequence[dict[bytes, bytes]]) -> dict[bytes, bytes]:
    return {digest: text for texts in every for digest, text in texts.items()}
