"""Who reads what in a load, who sends it to whom: by formula, so without processes."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise, product
from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forms import FULL
from support.simulated_ranks import Network

from fastserial.checkpoints.convert import name_of
from fastserial.config import current
from fastserial.distributed.comm.distinct import FromRanks, gather_distinct
from fastserial.distributed.comm.group import RankGroup
from fastserial.distributed.layout import slabs
from fastserial.distributed.layout.boxes import Box
from fastserial.distributed.layout.file_index import FileTensor
from fastserial.distributed.layout.grid import Grid
from fastserial.distributed.layout.placement import (
    DimShard,
    Flat,
    Holding,
    Mesh,
    TensorSpec,
    boxes_on,
)
from fastserial.distributed.load import read_plan
from fastserial.distributed.load.files import StoredFiles
from fastserial.distributed.load.matching import TensorMatch
from fastserial.distributed.load.read_plan import ReadPlan
from fastserial.distributed.load.reader import Arrays, divided_jobs
from fastserial.distributed.load.wanted import Demands, demands_of, texts_of
from fastserial.formats.stored import Chunk, whole_box
from fastserial.formats.tensors import contiguous_stride

NONE = torch.empty(0)
MEMORY, PLACES = torch.empty(1 << 16, dtype=torch.uint8), count()


def a_view(box: Box) -> torch.Tensor:
    """Return a tensor at another place than all before."""
    return MEMORY.as_strided(box.sizes, [0] * len(box.sizes), next(PLACES) % len(MEMORY))


def told(said: list[list[bytes]]) -> list[list[FromRanks]]:
    """Return what each rank hears if they say this."""

    def work(comm: RankGroup) -> list[FromRanks]:
        return gather_distinct(comm, said[comm.rank])

    found = [result for result, _ in Network(len(said)).run(work, timeout=30)]
    assert all(one == found[0] for one in found)
    return found


def random_mesh(chance: random.Random, ranks: list[int], dims: int) -> Mesh:
    """Return ranks in a grid, perhaps as FSDP2 over tensor parallelism has them."""
    count = len(ranks)
    rows = chance.choice([n for n in range(1, count + 1) if count % n == 0])
    first, second = (chance.choice([None, *range(dims)]) for _ in range(2))
    strided = first is not None and first == second and chance.random() < 0.7
    factor = count // rows if strided and chance.random() < 0.8 else 2 if strided else 1
    return Mesh((rows, count // rows), (tuple(ranks),), (DimShard(first, factor), DimShard(second)))


def random_holdings(chance: random.Random, size: int, tensor: FileTensor) -> list[list[Any]]:
    """Return how each rank holds a tensor, which may be not at all, or in two ways."""
    found: list[list[Any]] = [[] for _ in range(size)]
    for _ in range(chance.choice([1, 1, 1, 2])):
        ranks = chance.sample(range(size), chance.randint(1, size))
        lacking = set(chance.sample(ranks, len(ranks) // 3)) if chance.random() < 0.2 else set()
        kind = chance.choice(["whole", "mesh", "mesh", "meshes", "flat"])
        step = max(1, len(ranks) // 2) if kind == "meshes" else len(ranks)
        seed = chance.random()
        for at in range(0, len(ranks) - step + 1, step):
            members = sorted(ranks[at : at + step])
            mesh = random_mesh(random.Random(seed), members, len(tensor.shape))
            numel = torch.Size(tensor.shape).numel()
            for rank in members:
                if rank in lacking:
                    continue
                if kind == "flat":
                    first = chance.randint(0, numel)
                    stop = min(numel, first + chance.randint(0, numel))
                    found[rank].append(Flat(((rank, first, stop),) if first < stop else ()))
                else:
                    found[rank].append(None if kind == "whole" else mesh)
    return found


def no_files() -> StoredFiles:
    """One file, which nobody opens."""
    files = StoredFiles("", current())
    files.names = [""]
    return files


def in_memory_order(shape: tuple[int, ...], turned: bool) -> tuple[int, ...]:
    if turned:
        return tuple(reversed(contiguous_stride(tuple(reversed(shape)))))
    return contiguous_stride(shape)


def random_chunks(chance: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Return a tensor in one piece, or cut along some of its dimensions."""
    cuts = []
    for size in shape:
        count = chance.choice([1, 1, 2, 3]) if chance.random() < 0.5 else 1
        inner = sorted(chance.sample(range(1, size), min(count, size) - 1)) if size > 1 else []
        cuts.append(list(pairwise([0, *inner, size])))
    return [
        Box(tuple(first for first, _ in spans), tuple(stop - first for first, stop in spans))
        for spans in product(*cuts)
    ]


def random_tensor(chance: random.Random, number: int, offset: int) -> FileTensor:
    """Return one as it lies in files: sometimes transposed, sometimes in several chunks."""
    shape = tuple(chance.choice([1, 2, 3, 5, 8, 17]) for _ in range(chance.randrange(4)))
    dtype = chance.choice([torch.uint8, torch.float32, torch.complex128])
    chunks: list[Chunk] = []
    for box in random_chunks(chance, shape):
        strides = in_memory_order(box.sizes, chance.random() < 0.3)
        chunks.append(Chunk(box, name_of(dtype), "", offset, 0, strides=strides))
        offset += box.numel * dtype.itemsize
        offset += chance.choice([0, 64, 5000]) + -offset % 16
    return FileTensor(number, dtype, shape, tuple(chunks))


def end_of(tensor: FileTensor) -> int:
    """Return where the last chunk of a tensor ends, with some space."""
    last = tensor.chunks[-1]
    end = last.offset + last.elements.numel * tensor.dtype.itemsize
    return end + -end % 16


def elements(grid: Grid, box: Box) -> set[int]:
    """Return the elements of a box of an array."""
    steps = contiguous_stride(grid.shape)
    ranges = [range(at, at + size) for at, size in zip(*box, strict=True)]
    return {sum(map(int.__mul__, at, steps)) for at in product(*ranges)}


class Job:
    """The plans of all ranks for one file."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.size = size = chance.choice([1, 2, 3, 4, 6, 8])
        tensors: list[FileTensor] = []
        offset = 64
        for number in range(chance.randint(1, 6)):
            tensors.append(random_tensor(chance, number, offset))
            offset = end_of(tensors[-1])
        arrays = Arrays([((one.number,), one) for one in tensors], no_files())
        jobs: list[list[TensorMatch]] = [[] for _ in range(size)]
        for tensor in tensors:
            for rank, ways in enumerate(random_holdings(chance, size, tensor)):
                for held in ways:
                    spec = TensorSpec(tensor.shape, tensor.dtype, held)
                    parts = [(box, a_view(box)) for box in boxes_on(spec, rank)]
                    jobs[rank].append(TensorMatch(tensor, Holding(spec, NONE, parts)))
        for some in jobs:
            chance.shuffle(some)
        divided = [divided_jobs(some, arrays) for some in jobs]
        assert not any(one.odd for one in divided)
        heard = told([texts_of(one.jobs, arrays.number_of) for one in divided])
        self.targets = [one.targets for one in divided]
        self.grids = {grid.offset: grid for one in divided for grid in one.grids}
        self.plans = [
            ReadPlan(one.grids, one.targets, Demands(demands_of(heard[rank])), rank)
            for rank, one in enumerate(divided)
        ]

    def read(self) -> Iterator[tuple[int, int, set[int]]]:
        """Yield what each rank reads: rank, array, elements; whatever overlaps, once."""
        for rank, plan in enumerate(self.plans):
            mine: dict[int, set[int]] = {}
            for target in plan.alone:
                some = mine.setdefault(target.grid.offset, set())
                some |= elements(target.grid, target.box)
            for step in plan.steps():
                for piece in plan.own_window(*step):
                    some = mine.setdefault(piece.grid.offset, set())
                    assert some.isdisjoint(range(piece.first, piece.stop))
                    some.update(range(piece.first, piece.stop))
            for number, some in mine.items():
                yield rank, number, some

    def check_reads(self) -> None:
        """No element is read by two ranks."""
        readers: Counter[tuple[int, int]] = Counter()
        for _, number, some in self.read():
            readers.update((number, element) for element in some)
        assert set(readers.values()) <= {1}

    def check_arrivals(self) -> None:
        """Each rank gets what it wants, once: from its own reads, or from one other rank."""
        for rank, plan in enumerate(self.plans):
            wanted = {(one.grid.offset, one.box) for one in self.targets[rank]}
            came: Counter[tuple[int, Box, int]] = Counter()
            alone = {(one.grid.offset, one.box) for one in plan.alone}
            for number, box in alone:
                came.update((number, box, at) for at in elements(self.grids[number], box))
            for step in plan.steps():
                for piece in plan.own_window(*step):
                    number = piece.grid.offset
                    for box in (box for where, box in wanted if where == number):
                        for part in piece.within(box):
                            came.update((number, box, at) for at in elements(piece.grid, part))
                for _, grid, box, part in plan.receives(*step):
                    number = grid.offset
                    came.update((number, box, at) for at in elements(grid, part))
            assert set(came.values()) <= {1}
            assert set(came) == {
                (number, box, at)
                for number, box in wanted
                for at in elements(self.grids[number], box)
            }

    def check_messages(self) -> int:
        """What one sends, another expects, in this order; nobody waits for a later step."""
        sent: dict[tuple[int, int], list[Any]] = {}
        expected: dict[tuple[int, int], list[Any]] = {}
        for rank, plan in enumerate(self.plans):
            keys = [(number, len(group.members), group.members) for group, number in plan.steps()]
            assert keys == sorted(keys)
            assert len(set(keys)) == len(keys)
            for key, (group, number) in zip(keys, plan.steps(), strict=True):
                for to, piece, part in plan.sends(group, number):
                    sent.setdefault((rank, to), []).append((key, piece.grid.offset, part))
                for owner, grid, _, part in plan.receives(group, number):
                    expected.setdefault((owner, rank), []).append((key, grid.offset, part))
        assert sent == expected
        return sum(map(len, sent.values()))

    def check_memory(self) -> None:
        """A window fits its buffer, and is aligned there for any element."""
        for plan in self.plans:
            for group, number in plan.steps():
                at = 0
                for piece in plan.own_window(group, number):
                    assert piece.at >= at
                    item = piece.grid.itemsize
                    assert piece.at % item == 0
                    at = piece.at + (piece.stop - piece.first) * item
                assert at <= group.window_bytes <= group.size


@settings(max_examples=3000 if FULL else 40, derandomize=not FULL, database=None, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([16, 64, 4096]), st.sampled_from([16, 160, 65536]),
       st.sampled_from([1, 3, 64]))  # fmt: skip
def test_every_wanted_byte_comes_once(seed: int, finest: int, window: int, joined: int) -> None:
    with (
        mock.patch.object(read_plan, "_FINEST", finest),
        mock.patch.object(read_plan, "_CUTS", min(4, finest // 16)),
        mock.patch.object(read_plan, "_LARGEST_WINDOW", window),
        mock.patch.object(read_plan, "_PAGE", 16),
        mock.patch.object(slabs, "_MOST_JOINED", joined),
    ):
        job = Job(seed)
        job.check_reads()
        job.check_arrivals()
        job.check_messages()
        job.check_memory()


def calls_of_a_plan(size: int, tensors: int) -> int:
    """Return how many functions a rank calls to plan a load of sharded and replicated tensors."""
    ranks, grid = tuple(range(size)), (size // 32, 32)
    meshes = [
        Mesh((size,), (ranks,), (DimShard(0),)),
        Mesh(grid, (ranks,), (DimShard(None), DimShard(0))),
        Mesh(grid, (ranks,), (DimShard(0, 32), DimShard(0))),
        Mesh(grid, (ranks,), (DimShard(0), DimShard(1))),
        None,
    ]
    shapes = [(4096, 4096), (512,), (64, 4096)]
    jobs = []
    for number in range(tensors):
        spec = TensorSpec(shapes[number % 3], torch.float32, meshes[number % 5])
        chunk = Chunk(whole_box(spec.shape), "float32", "", number << 26, 0)
        tensor = FileTensor(number, spec.dtype, spec.shape, (chunk,))
        jobs.append(TensorMatch(tensor, Holding(spec, NONE, [])))
    arrays = Arrays([((), job.tensor) for job in jobs], no_files())
    calls = 0

    def counting(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(counting)
    try:
        divided = divided_jobs(jobs, arrays)
        found = [FromRanks(text, ranks) for text in texts_of(divided.jobs, arrays.number_of)]
        ReadPlan(divided.grids, [], Demands(demands_of(found)), size // 2)
    finally:
        sys.setprofile(None)
    return calls


def test_another_tensor_costs_the_same_with_many_ranks() -> None:
    few, many = (calls_of_a_plan(size, 600) - calls_of_a_plan(size, 300) for size in (64, 8192))
    assert 0 < many < 1.2 * few
