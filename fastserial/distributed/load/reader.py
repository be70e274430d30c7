"""The bytes of a load: from the file to the ranks that want them.

What only one rank wants, it reads itself, directly into the target where that is possible. What
several want, one of them reads, a window at a time, and sends it on while it reads the next one.
Who reads what, each rank knows from its plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from fastserial.checkpoints.tensor_read import read_tensor_into
from fastserial.distributed.load.read_plan import ReadGroup, ReadPlan
from fastserial.distributed.plan.matching import TensorMatch
from fastserial.distributed.ranks.exchange import INTEGERS, Exchange
from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.reading.part_reader import PartReader, ReadTarget
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.file_index import FileTensor
from fastserial.distributed.sharding.grid import Grid, grid_of
from fastserial.loading.reader import FastFileReader


def grids_of(leaves: Iterable[tuple[Any, Any]]) -> dict[int, Grid]:
    """Return the grids of the tensors among a file's leaves, by their numbers.

    Tensors that are the same array of the file have the same grid.
    """
    found: dict[int, Grid] = {}
    same: dict[object, Grid | None] = {}
    for _, tensor in leaves:
        if isinstance(tensor, FileTensor) and tensor.problem is None and 0 not in tensor.shape:
            array = tensor.offset, tensor.dtype, tensor.shape, tensor.stride, tensor.pending
            if array not in same:
                same[array] = grid_of(tensor)
            grid = same[array]
            if grid is not None:
                found[tensor.number] = grid
    return found


class Jobs(NamedTuple):
    """What a rank wants of a file.

    Attributes:
        targets: what it reads, or gets from others.
        arrays: of which jobs these are, and those of which this rank has nothing.
        odd: what only `read_odd` can read.
    """

    targets: list[ReadTarget]
    arrays: list[TensorMatch]
    odd: list[TensorMatch]


def divided_jobs(jobs: Sequence[TensorMatch], grids: Mapping[int, Grid]) -> Jobs:
    """Divide the jobs of a load. Of two for the same memory it is the later one."""
    last: dict[object, tuple[int, ReadTarget]] = {}
    odd: list[TensorMatch] = []
    empty: set[int] = set()
    for number, job in enumerate(jobs):
        grid = grids.get(job.tensor.number)
        if grid is None:
            odd += [job] if job.held.parts else []
            continue
        for box, view in job.held.parts:
            spot = (view.device, view.data_ptr(), view.shape, view.stride(), view.dtype)
            last.pop(spot, None)
            last[spot] = number, ReadTarget(grid, grid.box_of(box), view)
        if not job.held.parts:
            empty.add(number)
    kept = sorted(empty.union(number for number, _ in last.values()))
    return Jobs([target for _, target in last.values()], [jobs[number] for number in kept], odd)


def read_odd(jobs: Iterable[TensorMatch], reader: FastFileReader) -> None:
    """Read what lies in the file as no part of an array does, on every rank that wants it.

    Raises:
        CorruptCheckpointError: the file changed meanwhile.
        OSError: it cannot be read.
    """
    for tensor, held in jobs:
        for box, view in held.parts:
            meta = torch.empty_strided(
                tensor.shape, tensor.stride, dtype=tensor.dtype, device="meta"
            )
            part = meta[box.slices(Box((0,) * len(tensor.shape), tensor.shape))]
            found = view
            if view.dtype != tensor.dtype:
                found = torch.empty(part.shape, dtype=tensor.dtype, device="cpu")
            read_tensor_into(reader, tensor.offset, part, found, tensor.pending)
            if found is not view:
                view.copy_(found)


class Flow:
    """One file's bytes on one rank."""

    def __init__(self, traffic: Traffic, parts: PartReader, plan: ReadPlan) -> None:
        """Prepare.

        Args:
            traffic: to the other ranks.
            parts: reads what this rank reads.
            plan: of this rank.
        """
        self._traffic, self.parts, self._plan = traffic, parts, plan
        self.exchange = Exchange(traffic)

    def share(self) -> None:
        """Read this rank's part of what several want, send it on, and receive the rest. Collective.

        Raises:
            DistributedError: another rank failed.
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        self._traffic.agree()  # here a rank waits as long as the others are alive
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
        self._traffic.alive()
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
                dtype = INTEGERS[grid.tensor.itemsize]
                view = torch.empty(part.sizes, dtype=dtype, device="cpu")
                later.append((targets, part, view))
            receives.setdefault(owner, []).append(view)
        self.exchange.move(sends, receives)
        for targets, part, view in later:
            for target in targets:
                target.deliver(part, view)
        if buffer is not None:
            for piece in own:
                for target in self._plan.shared[piece.grid.tensor.number]:
                    for part in piece.within(target.box):
                        target.deliver(part, piece.found(buffer, part))

    def _targets_of(self, grid: Grid, box: Box) -> list[ReadTarget]:
        """Return the targets that want a box; there may be none, if others are of their memory."""
        return [one for one in self._plan.shared[grid.tensor.number] if one.box == box]
