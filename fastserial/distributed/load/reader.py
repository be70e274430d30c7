"""The bytes of a load: from the file to the ranks that want them.

What only one rank wants, it reads itself, directly into the target where that is possible. What
several want, one of them reads, a window at a time, and sends it on while it reads the next one.
Who reads what, each rank knows from its plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import torch

from fastserial.checkpoints.tensor_read import read_tensor_into
from fastserial.distributed.comm.exchange import INTEGERS, Exchange
from fastserial.distributed.comm.group import RankGroup
from fastserial.distributed.layout.boxes import Box, intersect
from fastserial.distributed.layout.file_index import FileTensor, Record
from fastserial.distributed.layout.grid import Grid, grid_of
from fastserial.distributed.load.files import StoredFiles
from fastserial.distributed.load.matching import TensorMatch
from fastserial.distributed.load.part_reader import PartReader, ReadTarget
from fastserial.distributed.load.read_plan import ReadGroup, ReadPlan
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.stored import Chunk, whole_box


class Arrays:
    """The arrays of a checkpoint: one for each chunk of its tensors.

    Tensors that are the same array of the file have the same one.
    """

    def __init__(self, leaves: Iterable[tuple[Any, Any]], files: StoredFiles) -> None:
        """Make none yet.

        Args:
            leaves: what the checkpoint has, with paths.
            files: its files.
        """
        self._files = files
        self._first: dict[int, FileTensor] = {}
        self._made: dict[tuple[int, int], Grid | Chunk] = {}
        same: dict[object, FileTensor] = {}
        for _, tensor in leaves:
            if isinstance(tensor, FileTensor) and tensor.problem is None and tensor.chunks:
                array = tensor.chunks, tensor.dtype, tensor.pending
                self._first[tensor.number] = same.setdefault(array, tensor)

    def number_of(self, tensor: FileTensor) -> int | None:
        """Return by which number ranks say that they want a tensor; None: each reads its own."""
        first = self._first.get(tensor.number)
        return None if first is None else first.number

    def of(self, tensor: FileTensor, boxes: Sequence[Box]) -> list[Grid | Chunk]:
        """Return what has some of a tensor's boxes; if the tensor is one array, that.

        Returns:
            Arrays, and chunks that are none.

        Raises:
            CorruptCheckpointError: one is damaged, or they do not make up the boxes.
            OSError: a file cannot be read.
        """
        first = self._first.get(tensor.number)
        if first is None:
            return []
        chunks = first.chunks
        if len(chunks) == 1 and chunks[0].is_all_of(first.shape):
            return [self._array(first, 0)]
        found: set[int] = set()
        for box in boxes:
            parts = [(at, intersect(box, one.elements)) for at, one in enumerate(chunks)]
            found.update(at for at, part in parts if part is not None)
            if sum(part.numel for _, part in parts if part is not None) != box.numel:
                path, key = self._files.path, chunks[0].key
                raise CorruptCheckpointError("its parts do not make it up", path=path, record=key)
        return [self._array(first, at) for at in sorted(found)]

    def _array(self, tensor: FileTensor, number: int) -> Grid | Chunk:
        """Return the array of a chunk, given its number."""
        found = self._made.get((tensor.number, number))
        if found is None:
            found = array_of(tensor, tensor.chunks[number], self._files)
            self._made[tensor.number, number] = found
        return found


def array_of(tensor: FileTensor, chunk: Chunk, files: StoredFiles) -> Grid | Chunk:
    """Return the array of a chunk that has elements.

    If it is none, the chunk with the place of its elements, or without if only torch can read it.

    Raises:
        CorruptCheckpointError, OSError: as `StoredFiles.located`.
    """
    place = files.located(chunk)
    dtype = getattr(torch, place.dtype or "", None) if place is not None else None
    if place is None or not isinstance(dtype, torch.dtype):
        return chunk._replace(start=None)
    return grid_of(tensor, place, dtype, files.address_of(place)) or place


class OddPart(NamedTuple):
    """A part of a tensor that is in no array: which elements, and into what they go.

    Attributes:
        chunk: that has them; None: the tensor is held.
    """

    tensor: FileTensor
    chunk: Chunk | None
    box: Box
    view: torch.Tensor


class Jobs(NamedTuple):
    """What a rank wants of a file.

    Attributes:
        targets: what it reads, or gets from others.
        jobs: whose these are, and those of tensors of which this rank has nothing.
        grids: of these.
        odd: what only `read_odd` can read.
    """

    targets: list[ReadTarget]
    jobs: list[TensorMatch]
    grids: list[Grid]
    odd: list[OddPart]


def records_of(grids: Iterable[Grid]) -> list[Record]:
    """Return the records of chunks that have a checksum each, in the order of their addresses."""
    found: list[Record] = []
    end = 0
    for grid in sorted(grids, key=lambda grid: grid.offset):
        nbytes, crc = prod(grid.shape) * grid.itemsize, grid.chunk.crc
        if crc is not None and grid.offset >= end:  # else it is the same one
            found.append(Record(grid.chunk.name, grid.offset, nbytes, crc))
            end = grid.offset + nbytes
    return found


def divided_jobs(jobs: Sequence[TensorMatch], arrays: Arrays) -> Jobs:
    """Divide the jobs of a load. Of two for the same memory it is the later one.

    Raises:
        CorruptCheckpointError, OSError: as `Arrays.of`.
    """
    last: dict[object, tuple[int, list[ReadTarget]]] = {}
    odd: list[OddPart] = []
    grids: dict[int, list[Grid]] = {}
    empty: set[int] = set()
    for number, (tensor, held) in enumerate(jobs):
        found = arrays.of(tensor, [box for box, _ in held.parts])
        grids[number] = [one for one in found if isinstance(one, Grid)]
        if not held.parts and (grids[number] or len(tensor.chunks) > 1):
            empty.add(number)
        for box, view in held.parts:
            if tensor.held is not None:
                odd.append(OddPart(tensor, None, box, view))
            targets: list[ReadTarget] = []
            for one in found:
                part = intersect(box, (one.chunk if isinstance(one, Grid) else one).elements)
                if part is None:
                    continue
                inner = view if part == box else view[part.slices(box)]
                if isinstance(one, Grid):
                    targets.append(ReadTarget(one, one.box_of(part), inner))
                else:
                    odd.append(OddPart(tensor, one, part, inner))
            if targets:
                spot = (view.device, view.data_ptr(), view.shape, view.stride(), view.dtype)
                last.pop(spot, None)
                last[spot] = number, targets
    kept = sorted(empty.union(number for number, _ in last.values()))
    return Jobs(
        [target for _, targets in last.values() for target in targets],
        [jobs[number] for number in kept],
        list(dict.fromkeys(grid for number in kept for grid in grids[number])),
        odd,
    )


def read_odd(odd: Iterable[OddPart], files: StoredFiles) -> None:
    """Read what is no part of an array, on every rank that wants it.

    Raises:
        CorruptCheckpointError: it is damaged, or a file changed meanwhile.
        ConvertError: torch does not load it under the rules of `weights_only`.
        OSError: a file cannot be read.
    """
    for tensor, chunk, box, view in odd:
        if chunk is None or chunk.start is None:
            stored = whole_box(tensor.shape) if chunk is None else chunk.elements
            whole = tensor.whole if chunk is None else files.tensor_of(chunk)
            view.copy_(whole[box.slices(stored)])
            continue
        sizes, dtype = chunk.elements.sizes, getattr(torch, chunk.dtype or "")
        meta = torch.empty_strided(sizes, chunk.stride, dtype=dtype, device="meta")
        part = meta[box.slices(chunk.elements)]
        found = view
        if view.dtype != dtype:
            found = torch.empty(part.shape, dtype=dtype, device="cpu")
        read_tensor_into(files, files.address_of(chunk), part, found, tensor.pending)
        if found is not view:
            view.copy_(found)


class Flow:
    """The bytes of a load on one rank."""

    def __init__(self, comm: RankGroup, parts: PartReader, plan: ReadPlan) -> None:
        """Prepare.

        Args:
            comm: to the other ranks.
            parts: reads what this rank reads.
            plan: of this rank.
        """
        self._comm, self.parts, self._plan = comm, parts, plan
        self.exchange = Exchange(comm)

    def share(self) -> None:
        """Read this rank's part of what several want, send it on, and receive the rest. Collective.

        Raises:
            DistributedError: another rank failed.
            CorruptCheckpointError: a file changed meanwhile.
            OSError: one cannot be read.
        """
        self._comm.barrier()  # here a rank waits as long as the others are alive
        with ThreadPoolExecutor(1, "fastserial-window") as pool:
            ahead = self._read_ahead(pool)
            for group, number in self._plan.steps():
                self._step(group, number, ahead)

    def _read_ahead(self, pool: ThreadPoolExecutor) -> Iterator[torch.Tensor]:
        """Yield a buffer with each window of this rank, while the next is read.

        It is good until the next.
        """
        windows = (self._plan.own_window(*step) for step in self._plan.steps())
        size = max((group.window_bytes for group in self._plan.groups), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(2)]
        reading: list[tuple[Future[None], torch.Tensor]] = []
        for window in filter(None, windows):
            buffers.reverse()
            reading.append((pool.submit(self.parts.read_window, window, buffers[0]), buffers[0]))
            if len(reading) == 2:
                done, buffer = reading.pop(0)
                done.result()
                yield buffer
        for done, buffer in reading:
            done.result()
            yield buffer

    def _step(self, group: ReadGroup, number: int, ahead: Iterator[torch.Tensor]) -> None:
        """Pass on the parts of one window of each member of a group.

        Args:
            number: of the windows.
            ahead: buffers with this rank's windows.
        """
        self._comm.heartbeat()
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        later: list[tuple[list[ReadTarget], Box, torch.Tensor]] = []
        own = self._plan.own_window(group, number)
        buffer = next(ahead) if own else None
        if buffer is not None:
            for rank, piece, part in self._plan.sends(group, number):
                sends.setdefault(rank, []).append(piece.found(buffer, part))
        for owner, grid, box, part in self._plan.receives(group, number):
            targets = self._targets_of(grid, box)
            if len(targets) == 1 and targets[0].takes_bytes():
                view = targets[0].part(part)
            else:
                dtype = INTEGERS[grid.itemsize]
                view = torch.empty(part.sizes, dtype=dtype, device="cpu")
                later.append((targets, part, view))
            receives.setdefault(owner, []).append(view)
        self.exchange.move(sends, receives)
        for targets, part, view in later:
            for target in targets:
                target.deliver(part, view)
        if buffer is not None:
            for piece in own:
                for target in self._plan.shared[piece.grid]:
                    for part in piece.within(target.box):
                        target.deliver(part, piece.found(buffer, part))

    def _targets_of(self, grid: Grid, box: Box) -> list[ReadTarget]:
        """Return the targets that want a box; there may be none, if others are of their memory."""
        return [one for one in self._plan.shared[grid] if one.box == box]
