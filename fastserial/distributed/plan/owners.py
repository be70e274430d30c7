"""Which rank reads which part of the file.

What only one rank wants it reads itself; what several want is divided among them, so that all of
them read about as many bytes. No element is read by two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fastserial.distributed.plan.balance import Workload, assign
from fastserial.distributed.sharding.boxes import Box, span_of
from fastserial.distributed.sharding.grid import Grid

# Bytes: smaller parts of a tensor are read together with what is near them. More than the gaps that
# `loading.reader` reads along, so that nobody reads what others own.
_FINEST = 256 * 1024
_CUTS = 4  # what several want is cut at multiples of a quarter of that

Wanted = Sequence[tuple[int, Box]]  # the array's number, and a box of it


class ReadShare(NamedTuple):
    """Elements [first, stop) of an array: `owner` reads them, all `members` want some of them."""

    array: int
    first: int
    stop: int
    owner: int
    members: tuple[int, ...]


class ReadShares(NamedTuple):
    """Who reads what; the same on every rank.

    Attributes:
        common: what several want, in the order of the file.
        alone: of each rank, the indices of the boxes that it reads itself.
    """

    common: list[ReadShare]
    alone: list[list[int]]


class _Cluster(NamedTuple):
    """Elements [first, stop) of an array, and the boxes in them: each a rank and its index."""

    first: int
    stop: int
    requests: list[tuple[int, int]]


def divide_reads(grids: Mapping[int, Grid], wanted: Sequence[Wanted]) -> ReadShares:
    """Divide what is wanted among the ranks that want it.

    Args:
        grids: the arrays, by their numbers.
        wanted: by each rank.
    """
    spans: dict[int, list[tuple[int, int, int, int]]] = {}
    for rank, boxes in enumerate(wanted):
        for index, (number, box) in enumerate(boxes):
            spans.setdefault(number, []).append((*span_of(grids[number].shape, box), rank, index))
    load = [0] * len(wanted)
    alone: list[list[int]] = [[] for _ in wanted]
    shared: list[tuple[int, _Cluster]] = []
    for number in sorted(spans, key=lambda number: grids[number].tensor.offset):
        item = grids[number].tensor.itemsize
        for cluster in _clusters(sorted(spans[number]), _FINEST // item):
            if len(cluster.requests) > 1:
                shared.append((number, cluster))
                continue
            rank, index = cluster.requests[0]
            load[rank] += (cluster.stop - cluster.first) * item
            alone[rank].append(index)
    items: list[Workload] = []
    for number, (first, stop, requests) in shared:
        nbytes = (stop - first) * grids[number].tensor.itemsize
        members = tuple(sorted({rank for rank, _ in requests}))
        items.append(Workload(nbytes, members, -(-nbytes * _CUTS // _FINEST)))
    common: list[ReadShare] = []
    for which, owner, begin, end in assign(items, len(wanted), load):
        number, (first, stop, _) = shared[which]
        step = _FINEST // _CUTS // grids[number].tensor.itemsize
        low, high = first + begin * step, min(first + end * step, stop)
        common.append(ReadShare(number, low, high, owner, items[which].owners))
    return ReadShares(common, alone)


def _clusters(spans: Iterable[tuple[int, int, int, int]], near: int) -> list[_Cluster]:
    """Join spans of one array that overlap, and small ones with what is near them.

    Args:
        spans: first element, end, rank and index, in order.
        near: elements.
    """
    found: list[_Cluster] = []
    for first, stop, rank, index in spans:
        last = found[-1] if found else None
        if last is not None:
            small = min(stop - first, last.stop - last.first) < near
            if first < last.stop or (small and first - last.stop < near):
                last.requests.append((rank, index))
                found[-1] = last._replace(stop=max(last.stop, stop))
                continue
        found.append(_Cluster(first, stop, [(rank, index)]))
    return found
