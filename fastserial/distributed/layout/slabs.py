"""Slabs: ranges of a row-major array that some ranks of a mesh have together, and nobody else.

A rank's part of a tensor that is split along its first dimension is one range; of one that is split
along another it is interleaved with those of others. A slab is the range in which they meet. It
follows from the shape, the placements and the rank's coordinates: no rank looks at all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fastserial.distributed.layout.placement import Mesh, Range, split_order
from fastserial.formats.tensors import contiguous_stride

_MOST_JOINED = 64  # ranks; with more, each would exchange bytes with too many at once


class Shards(NamedTuple):
    """Shards [first, stop), counted along some dimensions of a mesh together, the outermost first.

    (8 x 2 ranks whose dimensions both split a dimension of a tensor make 16 shards of it.)
    """

    axes: tuple[int, ...]
    first: int
    stop: int


class Slab(NamedTuple):
    """Elements [first, stop) of an array, and the shards of which they are.

    Whoever is at these coordinates of the mesh, and at any along its other dimensions, has some.
    """

    first: int
    stop: int
    shards: tuple[Shards, ...]


def slab_at(
    shape: tuple[int, ...], order: Sequence[int], mesh: Mesh, index: int, least: int
) -> Slab | None:
    """Return the slab in which a rank's part of an array is, None if that is surely empty.

    All ranks that have some of a slab find the same one. It is this rank's part alone, if that is
    one range, and large enough.

    Args:
        shape: of the array.
        order: the tensor's dimension for each of the array's.
        mesh: its splits are of the tensor's dimensions; its ranks do not matter.
        index: the rank's row-major index in the mesh.
        least: elements; neighbours whose shards are smaller are joined, up to `_MOST_JOINED`.
    """
    found: list[Shards] = []
    base, ranks = 0, prod(mesh.shape)
    for dim, (size, row) in enumerate(zip(shape, contiguous_stride(shape), strict=True)):
        axes = split_order(order[dim], mesh)
        if any(factor != 1 for _, factor in axes):  # its shards are several ranges
            return Slab(base, base + size * row, tuple(found))
        counts = [mesh.shape[axis] for axis, _ in axes]
        shards = prod(counts)
        ranks //= shards  # that have one of these shards
        joined, most = 1, min(shards, _MOST_JOINED // ranks)
        while joined < most and -(-size // shards) * row * joined < least:
            joined *= 2
        at = _shard_of(index, mesh.shape, [axis for axis, _ in axes])
        low = at - at % joined
        high = min(low + joined, shards)
        first, stop = range_of(size, counts, low)[0], range_of(size, counts, high - 1)[1]
        if first == stop:
            return None
        if axes:
            found.append(Shards(tuple([axis for axis, _ in axes]), low, high))
        if joined > 1 or stop - first > 1:
            return Slab(base + first * row, base + stop * row, tuple(found))
        base += first * row
    return Slab(base, base + 1, tuple(found))


def range_of(size: int, counts: Sequence[int], shard: int) -> Range:
    """Return which indices of a dimension a shard has.

    Args:
        size: of the dimension.
        counts: into how many parts it is cut, and each of these again.
        shard: its number.
    """
    first, stop = 0, size
    below = prod(counts)
    for count in counts:
        below //= count
        at, shard = divmod(shard, below)
        step = -(-(stop - first) // count)
        first = min(first + at * step, stop)
        stop = min(first + step, stop)
    return first, stop


def indices_with(shape: tuple[int, ...], shards: Sequence[Shards]) -> list[int]:
    """Return the row-major indices of a mesh that have these shards, in order."""
    steps = contiguous_stride(shape)
    found = [0]
    for axes, first, stop in shards:
        offsets: list[int] = []
        for number in range(first, stop):
            offset = 0
            for axis in reversed(axes):
                number, at = divmod(number, shape[axis])
                offset += at * steps[axis]
            offsets.append(offset)
        found = [before + offset for before in found for offset in offsets]
    taken = {axis for axes, _, _ in shards for axis in axes}
    for axis, size in enumerate(shape):
        if axis not in taken:
            found = [before + at * steps[axis] for before in found for at in range(size)]
    return sorted(found)


def _shard_of(index: int, shape: tuple[int, ...], axes: Sequence[int]) -> int:
    """Return which shard along some dimensions of a mesh is at a row-major index."""
    steps = contiguous_stride(shape)
    found = 0
    for axis in axes:
        found = found * shape[axis] + index // steps[axis] % shape[axis]
    return found
