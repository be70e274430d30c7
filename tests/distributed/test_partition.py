"""What each rank writes, sends and receives in a save: by arithmetic, without processes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastserial.distributed.layout.boxes import Box, run_of, span_of
from fastserial.distributed.layout.holders import MeshHolders, MeshRanks, SplitDim
from fastserial.distributed.layout.placement import DimShard, Flat, Mesh, TensorSpec, boxes_on
from fastserial.distributed.save.partition import GRAIN, FilePlan, FileRange, Move, Partition, Round

DTYPES = (torch.uint8, torch.float32, torch.complex128)
ROWS, COLUMNS, DEPTHS = (1, 3, 40, 300), (1, 8, 150), (1, 2, 5)


def random_held(chance: random.Random, size: int, units: list[list[int]], shape: Any) -> Any:
    members = chance.choice(units)
    numel = torch.Size(shape).numel()
    kind = chance.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        ends = sorted(chance.randint(0, numel) for _ in members[1:])
        cuts = zip(members, [0, *ends], [*ends, numel], strict=True)
        return Flat(tuple((rank, a, b) for rank, a, b in cuts if a < b))
    if kind == 2 and len(members) > 1:  # two replicas, cut elsewhere
        half = numel // 2
        whole = [(rank, 0, numel) for rank in members[1::2]]
        halves = [(rank, *ends) for rank in members[::2] for ends in ((0, half), (half, numel))]
        return Flat(tuple(one for one in whole + halves if one[1] < one[2]))
    dims = range(len(shape))
    if kind in (3, 4) and len(members) % 2 == 0:
        grid = (2, len(members) // 2)
        first, second = (chance.choice([None, *dims]) for _ in grid)
        strided = first is not None and chance.random() < 0.5  # as FSDP2 with tensor parallelism
        splits = DimShard(first, grid[1] if strided and first == second else 1), DimShard(second)
        if first is not None and chance.random() < 0.2:
            splits = (
                DimShard(first, chance.choice([2, 3])),
                DimShard(second),
            )  # in no order of chunks
        return Mesh(grid, (tuple(members),), splits)
    several = tuple(tuple(unit) for unit in units if len(unit) == len(members))
    grids = several if chance.random() < 0.3 and disjoint(several) else (tuple(members),)
    factor = 2 if chance.random() < 0.1 else 1
    return Mesh((len(members),), grids, (DimShard(chance.choice(dims), factor),))


def disjoint(grids: tuple[tuple[int, ...], ...]) -> bool:
    return len({rank for grid in grids for rank in grid}) == sum(map(len, grids))


def random_plan(chance: random.Random, size: int) -> tuple[FilePlan, list[TensorSpec]]:
    ranks = list(range(size))
    step = chance.choice([1, 2, size])
    units = [ranks[at : at + step] for at in range(0, size, step)]
    if chance.random() < 0.3:
        units.append(chance.sample(ranks, min(2, size)))
    records, specs, at = [], [], chance.choice([0, 128, 3 * GRAIN])
    for number in range(chance.randrange(12)):
        at += chance.choice([0, 100, 500])
        at += -at % chance.choice([64, 64, GRAIN])
        if chance.random() < 0.1:
            nbytes = chance.randrange(1, 3 * GRAIN)
            records.append((number, -1 - number, at, nbytes))
        else:
            shape = (chance.choice(ROWS), chance.choice(COLUMNS), chance.choice(DEPTHS))
            shape = shape[: chance.choice([1, 2, 2, 3])]
            dtype = chance.choice(DTYPES)
            spec = TensorSpec(shape, dtype, random_held(chance, size, units, shape))
            nbytes = spec.nbytes
            records.append((number, len(specs), at, nbytes))
            specs.append(spec)
        at += nbytes
    count = size if chance.random() < 0.6 else chance.randint(1, size)
    writers = sorted(chance.sample(ranks, count))
    end = at + chance.choice([0, 50, 2 * GRAIN])
    return FilePlan(end, records, writers, cuts_replicas=chance.random() < 0.5), specs


def partitions(
    plan: FilePlan, specs: list[TensorSpec], size: int, tile: int = 4 * GRAIN
) -> list[Partition]:
    return [Partition(plan, specs, rank, size, tile) for rank in range(size)]


def held_by(spec: TensorSpec, rank: int) -> list[Box]:
    held = spec.held
    if isinstance(held, Flat):
        specs = [replace(spec, held=Flat((one,))) for one in held.ranges]
        return [box for one in specs for box in boxes_on(one, rank)]
    return boxes_on(spec, rank)


def check(plan: FilePlan, specs: list[TensorSpec], size: int, tile: int = 4 * GRAIN) -> int:
    """Check what all ranks do; return how many bytes travel."""
    made = partitions(plan, specs, size, tile)
    rounds = [{key: one.round(key) for key in one.rounds} for one in made]
    owners = [-1] * -(-plan.nbytes // GRAIN)
    written: list[tuple[int, int]] = []
    for rank, one in enumerate(made):
        own = list(one.own_pieces())
        mine = own + [piece for found in rounds[rank].values() for piece in found.pieces]
        for piece in mine:
            for block in range(piece.offset // GRAIN, -(-(piece.offset + piece.length) // GRAIN)):
                assert owners[block] in (-1, rank), "a block with two owners"
                owners[block] = rank
        written += [(piece.offset, piece.length) for piece in mine]
        assert one.nbytes == sum(piece.length for piece in mine)
        assert list(one.rounds) == sorted(one.rounds)
        for piece in own:
            assert rank == 0 if piece.source < 0 else is_one_run(specs[piece.source], rank, piece)
    at = 0
    for offset, length in sorted(written):
        assert offset == at, "a gap, or twice"
        at += length
    assert at == plan.nbytes
    assert set(owners) <= {*plan.writers, -1}
    for offset in range(0, plan.nbytes, GRAIN):  # 4 bytes at the edge of two blocks
        halves = [(offset + GRAIN - 2, b"ab"), (offset + GRAIN, b"cd")]
        found = [(rank, *one) for rank, made_by in enumerate(made)
                 for one in made_by.owned(offset + GRAIN - 2, b"abcd")]  # fmt: skip
        expected = zip(owners[offset // GRAIN :], halves, strict=False)
        assert sorted(found) == sorted((owner, *half) for owner, half in expected)
    for key in {key for some in rounds for key in some}:
        check_tiles({rank: some[key] for rank, some in enumerate(rounds) if key in some}, tile)
    return exchanged(rounds, specs)


def check_tiles(here: dict[int, Round], tile: int) -> None:
    for found in here.values():
        # Of each of up to three runs it has at least a block; and those with edges of records.
        most = max(tile, 3 * GRAIN) + 2 * GRAIN
        assert sum(piece.length for piece in found.pieces) <= most
        places = sorted((at, at + piece.length) for piece, at in found.pieces.items())
        assert all(a[1] <= b[0] for a, b in pairwise(places))
        assert all((at - piece.offset) % 16 == 0 for piece, at in found.pieces.items())


def is_one_run(spec: TensorSpec, rank: int, piece: FileRange) -> bool:
    """Return whether a rank has a piece in one of its boxes, in the order of the file."""
    item = spec.dtype.itemsize
    first, stop = piece.start // item, (piece.start + piece.length) // item
    if isinstance(spec.held, Flat):  # consecutive in its tensor, whatever boxes that is
        return any(r == rank and a <= first and stop <= b for r, a, b in spec.held.ranges)
    runs = [run_of(spec.shape, box) for box in boxes_on(spec, rank)]
    return any(run is not None and run[0] <= first and stop <= run[1] for run in runs)


def elements(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Return the row-major numbers of a box's elements, in order."""
    found = torch.zeros(1, dtype=torch.int64)
    for size, first, length in zip(shape, *box, strict=True):
        found = (found[:, None] * size + torch.arange(first, first + length)).flatten()
    return found


def exchanged(rounds: list[dict[Any, Round]], specs: list[TensorSpec]) -> int:
    """Check that what one sends another expects, and that all of a tile comes, once."""
    moved = 0
    for rank, some in enumerate(rounds):
        for key, found in some.items():
            for other, moves in found.sends.items():
                expected = order(rounds[other][key].receives[rank], specs)
                for (record, some), (same, sent) in zip(expected, order(moves, specs), strict=True):
                    assert record == same
                    assert torch.equal(some, sent)
                for move in moves:
                    boxes = held_by(specs[move.piece.source], rank) if move.part else []
                    assert any(box.contains(move.part) for box in boxes) or (
                        move.part is None and rank == 0
                    ), "it does not have that"
            arrived: dict[FileRange, int] = {}
            for other, moves in found.receives.items():
                assert rounds[other][key].sends[rank]
                for move in moves:
                    assert within(move, specs)
                    nbytes = bytes_of(move, specs)
                    arrived[move.piece] = arrived.get(move.piece, 0) + nbytes
                    moved += nbytes * (other != rank)
            assert arrived == {piece: piece.length for piece in found.pieces}
    return moved


def order(moves: list[Move], specs: list[TensorSpec]) -> list[tuple[int, torch.Tensor]]:
    """Return which element of which record comes when; of bytes without a tensor, which."""
    found: list[tuple[int, list[torch.Tensor]]] = []
    for piece, part in moves:
        if part is None:
            some = torch.arange(piece.offset, piece.offset + piece.length)
        else:
            some = elements(specs[piece.source].shape, part)
        if not found or found[-1][0] != piece.record:
            found.append((piece.record, []))
        found[-1][1].append(some)
    return [(record, torch.cat(some)) for record, some in found]


def within(move: Move, specs: list[TensorSpec]) -> bool:
    piece, part = move
    if part is None:
        return True
    spec = specs[piece.source]
    first, stop = span_of(spec.shape, part)
    item = spec.dtype.itemsize
    return piece.start <= first * item and stop * item <= piece.start + piece.length


def bytes_of(move: Move, specs: list[TensorSpec]) -> int:
    if move.part is None:
        assert move.piece.source < 0
        return move.piece.length
    return move.part.numel * specs[move.piece.source].dtype.itemsize


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_all_of_the_file_once(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice([1, 2, 4, 6])
    check(*random_plan(chance, size), size, chance.choice([GRAIN, 4 * GRAIN]))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_holders_are_those_that_the_placements_name(seed: int) -> None:
    """What is asked backwards, from an element to its holder, is what the shards say forwards."""
    chance = random.Random(seed)
    size = chance.choice([2, 4, 6, 8])
    shape = (chance.randrange(1, 20), chance.randrange(1, 8), chance.randrange(1, 4))
    shape = shape[: chance.randrange(1, 4)]
    held = random_held(chance, size, [list(range(size))], shape)
    if not isinstance(held, Mesh) or all(split.dim is None for split in held.splits):
        return
    spec = TensorSpec(shape, torch.uint8, held)
    ranks = MeshRanks(held, 0)
    for replica in range(len(ranks.replicas)):
        holders = MeshHolders(shape, ranks, replica)
        for element in range(spec.numel):
            rank, stop = holders.holder_at(element)
            box = next(box for box in boxes_on(spec, rank) if element in elements(shape, box))
            assert {*range(element, stop)} <= {*elements(shape, box).tolist()}


REPLICA = TensorSpec((40 * GRAIN,), torch.uint8, None)


@pytest.mark.parametrize("writers", [[0, 1, 2], [1, 2]])
def test_replicas_that_were_compared_are_divided(writers: list[int]) -> None:
    plan = FilePlan(41 * GRAIN, [(0, 0, GRAIN, REPLICA.nbytes)], writers, cuts_replicas=True)
    # the container's own block is rank 0's
    assert check(plan, [REPLICA], 3) == (0 if 0 in writers else GRAIN)
    blocks = [one.nbytes // GRAIN for one in partitions(plan, [REPLICA], 3) if one.nbytes]
    assert len(blocks) == len(writers)
    assert max(blocks) - min(blocks) <= 2


@pytest.mark.parametrize("writers", [[0, 1, 2], [1, 2]])
def test_replicas_that_were_sampled_stay_whole(writers: list[int]) -> None:
    """And are taken from one writer after the other."""
    count = 6
    records = [(n, n, (1 + 40 * n) * GRAIN, REPLICA.nbytes) for n in range(count)]
    plan = FilePlan((1 + 40 * count) * GRAIN, records, writers)
    specs = [REPLICA] * count
    # with fewer writers, a tensor on the border of two travels in part
    assert check(plan, specs, 3) <= (0 if 0 in writers else 41 * GRAIN)
    assert {len(some) for some in senders(plan, specs, 3).values()} == {1}
    blocks = [one.nbytes // GRAIN for one in partitions(plan, specs, 3) if one.nbytes]
    assert max(blocks) - min(blocks) <= 1


def senders(plan: FilePlan, specs: list[TensorSpec], size: int) -> dict[int, set[int]]:
    """Return the ranks whose memory each source is taken from."""
    found: dict[int, set[int]] = {}
    for rank, one in enumerate(partitions(plan, specs, size)):
        pieces = list(one.own_pieces())
        for key in one.rounds:
            pieces += [move.piece for some in one.round(key).sends.values() for move in some]
        for piece in pieces:
            if piece.source >= 0:
                found.setdefault(piece.source, set()).add(rank)
    return found


def test_nothing_travels_that_a_rank_alone_has() -> None:
    alone = TensorSpec((90 * GRAIN,), torch.uint8, Flat(((1, 0, 90 * GRAIN),)))
    plan = FilePlan(91 * GRAIN, [(0, 0, GRAIN, alone.nbytes)], [0, 1, 2])
    assert not check(plan, [alone], 3)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_of_one_replica(axis: int) -> None:
    """Of HSDP: the shards of a tensor are taken from the same replica of the mesh."""
    splits = [DimShard(None), DimShard(0)]
    mesh = Mesh((2, 2), ((0, 1, 2, 3),), tuple(splits if axis == 0 else reversed(splits)))
    replicas = [{0, 1}, {2, 3}] if axis == 0 else [{0, 2}, {1, 3}]
    specs = [TensorSpec((8, GRAIN), torch.uint8, mesh)] * 4
    records = [(n, n, (1 + 8 * n) * GRAIN, specs[n].nbytes) for n in range(4)]
    plan = FilePlan(33 * GRAIN, records, [0, 1, 2, 3])
    assert not check(plan, specs, 4)
    taken = senders(plan, specs, 4)
    assert [taken[number] for number in range(4)] == [replicas[number // 2] for number in range(4)]


@pytest.mark.parametrize("cuts_replicas", [False, True])
@pytest.mark.parametrize("writers", [[0], [0, 2], [0, 1, 2, 3]])
def test_flat_ranges_are_of_one_replica(writers: list[int], cuts_replicas: bool) -> None:
    """Nobody compares them: neither who writes nor what was compared else mixes replicas."""
    half = 20 * GRAIN
    held = Flat(tuple((rank, rank % 2 * half, (rank % 2 + 1) * half) for rank in range(4)))
    specs = [TensorSpec((2 * half,), torch.uint8, held)] * 8
    records = [(n, n, n * 2 * half, 2 * half) for n in range(8)]
    plan = FilePlan(16 * half, records, writers, cuts_replicas=cuts_replicas)
    taken = senders(plan, specs, 4)
    assert [taken[n] for n in range(8)] == [{0, 1}] * 4 + [{2, 3}] * 4


def test_boxes_side_by_side_are_no_run() -> None:
    """A rank may hold neighbouring rows apart, as a strided shard of a mesh of one rank."""
    spec = TensorSpec((512, 4096), torch.float32, Mesh((1,), ((0,),), (DimShard(0, 2),)))
    check(FilePlan(spec.nbytes + 900, [(0, 0, 640, spec.nbytes)], [0, 1]), [spec], 2)


def test_all_owners_of_a_large_interleaved_tensor_work_at_once() -> None:
    """And none puts more than a tile together in a round."""
    spec = TensorSpec((64, 2 * GRAIN), torch.uint8, Mesh((4,), ((0, 1, 2, 3),), (DimShard(1),)))
    plan = FilePlan(spec.nbytes, [(0, 0, 0, spec.nbytes)], [0, 1, 2, 3])
    made = partitions(plan, [spec], 4)
    assert [len(one.rounds) for one in made] == [8] * 4
    for key in made[0].rounds:
        for one in made:
            assert sum(piece.length for piece in one.round(key).pieces) == 4 * GRAIN


def test_many_small_tensors_travel_at_once() -> None:
    spec = TensorSpec((256,), torch.float32, Mesh((4,), ((0, 1, 2, 3),), (DimShard(0),)))
    records = [(n, n, 1152 * n, spec.nbytes) for n in range(4000)]
    made = Partition(FilePlan(1152 * 4000, records, [0, 1, 2, 3]), [spec] * 4000, 1, 4)
    assert len(made.rounds) <= 2  # 64, if each record were counted


@pytest.mark.parametrize("missing", [1, 2])
def test_what_the_group_lacks_is_not_passed_over(missing: int) -> None:
    """Of two replicas one is incomplete; of shard 1 there is none, or one."""
    grid = (0, -1, 2, -1 if missing == 2 else 3)
    spec = TensorSpec((8, GRAIN), torch.uint8, Mesh((2, 2), (grid,), (DimShard(None), DimShard(0))))
    plan = FilePlan(spec.nbytes, [(0, 0, 0, spec.nbytes)], [0, 1, 2, 3])
    if missing == 2:
        with pytest.raises(ValueError, match="do not make the whole"):
            Partition(plan, [spec], 0, 4)
    else:
        assert senders(plan, [spec], 4) == {0: {2, 3}}


def test_a_rank_looks_at_its_own_only() -> None:
    """With 64 times as many ranks it looks at no more shards."""
    calls = []
    for size in (16, 1024):
        shape = (64 * size, 2 * GRAIN)
        spec = TensorSpec(shape, torch.uint8, Mesh((size,), (tuple(range(size)),), (DimShard(0),)))
        records = [(n, n, 192 + n * (spec.nbytes + 192), spec.nbytes) for n in range(8)]
        plan = FilePlan(8 * (spec.nbytes + 192), records, list(range(size)))
        with pytest.MonkeyPatch.context() as patch:
            seen: list[int] = []
            at = SplitDim.at
            patch.setattr(SplitDim, "at", lambda self, i: (seen.append(i), at(self, i))[1])  # noqa: B023
            made = Partition(plan, [spec] * 8, size // 2, size)
            for key in made.rounds:
                made.round(key)
        calls.append(len(seen))
    assert calls[1] <= calls[0] + 8


def test_many_ranges_of_each_rank_are_several_rounds() -> None:
    """Where a range ends within a block, all of the block travels to one rank."""
    size, ranges, tensors = 2, 6, 20
    numel = ranges * 2 * GRAIN + 4096
    ends = [numel * at // ranges for at in range(ranges + 1)]
    held = Flat(tuple((at % size, *some) for at, some in enumerate(pairwise(ends))))
    specs = [TensorSpec((numel,), torch.uint8, held)] * tensors
    step = numel + GRAIN - numel % GRAIN
    records = [(at, at, at * step, numel) for at in range(tensors)]
    plan = FilePlan(tensors * step, records, list(range(size)))
    check(plan, specs, size)
    assert max(len(one.rounds) for one in partitions(plan, specs, size)) > tensors // 2
