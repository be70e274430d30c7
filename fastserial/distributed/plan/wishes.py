"""What a rank wants of the file: targets in memory, and the blocks of the file they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastserial.checkpoints.tensor_read import read_tensor_into
from fastserial.distributed.plan.grid import Grid, grid_of
from fastserial.distributed.plan.matching import Job
from fastserial.distributed.plan.owners import NeedMap
from fastserial.distributed.plan.tiles import Target
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.file_index import FileTensor
from fastserial.loading.reader import FastFileReader

__all__ = ["Wishes", "grids_of"]


@dataclass(frozen=True, slots=True)
class _Odd:
    """A part of a tensor that lies in the file as no part of an array does (see `grid_of`)."""

    tensor: FileTensor
    box: Box
    view: torch.Tensor


def grids_of(leaves: Iterable[tuple[Any, Any]]) -> dict[int, Grid]:
    """Return the grids of the tensors among a file's leaves, by their numbers."""
    grids: dict[int, Grid] = {}
    for _, leaf in leaves:
        if isinstance(leaf, FileTensor) and leaf.problem is None and 0 not in leaf.shape:
            grid = grid_of(leaf)
            if grid is not None:
                grids[leaf.number] = grid
    return grids


class Wishes:
    """What a rank wants of the file. Of two for the same memory it is the later one.

    Attributes:
        targets: what is read by windows or straight.
        odd: what `read_odd` reads.
    """

    def __init__(self, jobs: Sequence[Job], grids: dict[int, Grid]) -> None:
        last: dict[object, Target | _Odd] = {}
        for job in jobs:
            grid = grids.get(job.tensor.number)
            for box, view in job.held.parts:
                spot = (view.device, view.data_ptr(), view.shape, view.stride(), view.dtype)
                last.pop(spot, None)
                last[spot] = (
                    Target(grid, grid.box_of(box), view)
                    if grid is not None
                    else _Odd(job.tensor, box, view)
                )
        self.targets = [wish for wish in last.values() if isinstance(wish, Target)]
        self.odd = [wish for wish in last.values() if isinstance(wish, _Odd)]

    def need(self, file_size: int, block: int) -> NeedMap:
        """Return which blocks of the file the targets need."""
        need = NeedMap(file_size, block)
        for target in self.targets:
            for first, stop in target.grid.runs(target.box, block):
                need.add(first, stop)
        return need

    def read_odd(self, reader: FastFileReader) -> None:
        """Read what can only be read tensor by tensor, on every rank that wants it.

        Raises:
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        for wish in self.odd:
            tensor, view = wish.tensor, wish.view
            meta = torch.empty_strided(
                tensor.shape, tensor.stride, dtype=tensor.dtype, device="meta"
            )
            whole = Box((0,) * len(tensor.shape), tensor.shape)
            part = meta[wish.box.slices(whole)]
            if view.dtype == tensor.dtype:
                read_tensor_into(reader, tensor.offset, part, view, tensor.pending)
            else:
                found = torch.empty(part.shape, dtype=tensor.dtype, device="cpu")
                read_tensor_into(reader, tensor.offset, part, found, tensor.pending)
                view.copy_(found)
