"""What each rank writes, sends and receives in a save: by arithmetic, without processes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from fastserial.distributed.plan.division import GRAIN, FilePlan, cover_of
from fastserial.distributed.plan.schedule import CONTAINER, FileRange, Move, Schedule
from fastserial.distributed.sharding.pieces import Flat, Mesh, Split, TensorSpec

DTYPES = (torch.uint8, torch.float32, torch.complex128)


def random_held(chance: random.Random, size: int, units: list[list[int]], shape: Any) -> Any:
    members = chance.choice(units)
    kind = chance.randrange(5)
    if kind == 0:
        return None
    if kind == 1:
        ends = sorted(chance.randint(0, torch.Size(shape).numel()) for _ in members[1:])
        cuts = zip(members, [0, *ends], [*ends, torch.Size(shape).numel()], strict=True)
        return Flat(tuple((rank, a, b) for rank, a, b in cuts if a < b))
    if kind == 2 and len(members) % 2 == 0:
        grid = (2, len(members) // 2)
        first, second = (chance.choice([None, 0, 1]) for _ in grid)
        strided = first is not None and chance.random() < 0.5  # as FSDP2 with tensor parallelism
        splits = Split(first, grid[1] if strided and first == second else 1), Split(second)
        return Mesh(grid, (tuple(members),), splits)
    return Mesh((len(members),), (tuple(members),), (Split(chance.randrange(2)),))


def random_plan(chance: random.Random, size: int) -> tuple[FilePlan, list[TensorSpec]]:
    ranks = list(range(size))
    step = chance.choice([1, 2, size])
    units = [ranks[at : at + step] for at in range(0, size, step)]
    if chance.random() < 0.3:
        units.append(chance.sample(ranks, min(2, size)))
    records, specs, at = [], [], chance.choice([100, 3 * GRAIN])
    for number in range(chance.randrange(12)):
        at += chance.choice([100, 500])
        at += -at % 64
        if chance.random() < 0.1:
            nbytes = chance.randrange(1, 3 * GRAIN)
            records.append((number, -1 - number, at, nbytes))
        else:
            shape = (chance.choice([1, 3, 40, 700]), chance.choice([1, 8, 300]))
            held = random_held(chance, size, units, shape)
            spec = TensorSpec(shape, chance.choice(DTYPES), held)
            nbytes = spec.nbytes
            records.append((number, len(specs), at, nbytes))
            specs.append(spec)
        at += nbytes
    writers = ranks if chance.random() < 0.7 else sorted(chance.sample(ranks, 1))
    return FilePlan(at + 50, records, writers, cuts_replicas=chance.random() < 0.5), specs


def has(spec: TensorSpec, size: int, rank: int, piece: FileRange) -> bool:
    """Return whether a rank has a piece as it is in the file."""
    item = spec.dtype.itemsize
    first, stop = piece.start, piece.start + piece.length
    return any(
        one.as_stored and rank in one.ranks and one.first * item <= first < stop <= one.stop * item
        for one in cover_of(spec.shape, spec.held, size).segments
    )


def check(plan: FilePlan, specs: list[TensorSpec], size: int, tile: int) -> int:
    """Check the schedules of all ranks; return how many bytes travel."""
    made = [Schedule(plan, specs, rank, size, tile) for rank in range(size)]
    written: list[tuple[int, int]] = []
    for rank, one in enumerate(made):
        mine = 0
        for piece in one.own_pieces():
            written.append((piece.offset, piece.length))
            mine += piece.length
            alone = piece.source < 0
            assert rank == 0 if alone else has(specs[piece.source], size, rank, piece), piece
        rounds = {number: one.round(number) for number in one.rounds}
        for found in rounds.values():
            assert sum(piece.length for piece, _ in found.pieces) <= tile
            written += [(piece.offset, piece.length) for piece, _ in found.pieces]
            mine += sum(piece.length for piece, _ in found.pieces)
            places = sorted((at, at + piece.length) for piece, at in found.pieces)
            assert all(a[1] <= b[0] for a, b in pairwise(places))
            assert all((at - piece.offset) % 16 == 0 for piece, at in found.pieces)
        assert one.nbytes == mine
    at = 0
    for offset, length in sorted(written):
        assert offset == at, "a gap, or twice"
        at += length
    assert at == plan.nbytes
    assert all(one.nbytes == 0 for rank, one in enumerate(made) if rank not in plan.writers)
    return exchanged(made, specs)


def exchanged(made: list[Schedule], specs: list[TensorSpec]) -> int:
    """Check that what one sends another expects, and that all of a tile comes."""
    moved = 0
    for rank, one in enumerate(made):
        for number in one.rounds:
            found = one.round(number)
            for other, moves in found.sends.items():
                assert made[other].round(number).receives[rank] == moves, "in the same order"
            arrived: dict[FileRange, int] = {}
            for other, moves in found.receives.items():
                assert made[other].round(number).sends[rank]
                for move in moves:
                    nbytes = bytes_of(move, specs)
                    arrived[move.piece] = arrived.get(move.piece, 0) + nbytes
                    moved += nbytes * (other != rank)
            assert arrived == {piece: piece.length for piece, _ in found.pieces}
    return moved


def bytes_of(move: Move, specs: list[TensorSpec]) -> int:
    if move.part is None:
        assert move.piece.source < 0
        assert move.piece.record == CONTAINER or move.piece.source < 0
        return move.piece.length
    return move.part.numel * specs[move.piece.source].dtype.itemsize


def test_all_of_the_file_once() -> None:
    chance = random.Random(5)
    moved = 0
    for _ in range(120):
        size = chance.choice([1, 2, 4, 6])
        moved += check(*random_plan(chance, size), size, chance.choice([GRAIN, 4 * GRAIN]))
    assert moved > 100 * GRAIN


REPLICA = TensorSpec((40 * GRAIN,), torch.uint8, None)


@pytest.mark.parametrize("writers", [[0, 1, 2], [1, 2]])
def test_replicas_that_were_compared_are_divided(writers: list[int]) -> None:
    alone = TensorSpec((10 * GRAIN,), torch.uint8, Flat(((1, 0, 10 * GRAIN),)))
    records = [(0, 0, GRAIN, REPLICA.nbytes), (1, 1, 41 * GRAIN, alone.nbytes)]
    plan = FilePlan(51 * GRAIN, records, writers, cuts_replicas=True)
    # the container's own block is rank 0's
    assert check(plan, [REPLICA, alone], 3, GRAIN) == (0 if 0 in writers else GRAIN)
    made = [Schedule(plan, [REPLICA, alone], rank, 3, GRAIN) for rank in writers]
    blocks = [one.nbytes // GRAIN for one in made]
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize("writers", [[0, 1, 2], [1, 2]])
def test_replicas_that_were_sampled_stay_whole(writers: list[int]) -> None:
    """And are taken from one writer after the other."""
    count = 6
    records = [(n, n, (1 + 40 * n) * GRAIN, REPLICA.nbytes) for n in range(count)]
    plan = FilePlan((1 + 40 * count) * GRAIN, records, writers)
    assert check(plan, [REPLICA] * count, 3, GRAIN) == (0 if 0 in writers else GRAIN)
    made = {rank: Schedule(plan, [REPLICA] * count, rank, 3, GRAIN) for rank in writers}
    sources = {
        rank: {piece.source for piece in one.own_pieces() if piece.source >= 0}
        for rank, one in made.items()
    }
    assert sorted(source for some in sources.values() for source in some) == list(range(count))
    assert {len(some) for some in sources.values()} == {count // len(writers)}


def test_nothing_travels_that_a_writer_alone_has() -> None:
    alone = TensorSpec((90 * GRAIN,), torch.uint8, Flat(((1, 0, 90 * GRAIN),)))
    plan = FilePlan(91 * GRAIN, [(0, 0, GRAIN, alone.nbytes)], [0, 1, 2])
    assert not check(plan, [alone], 3, GRAIN)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_of_one_replica(axis: int) -> None:
    """Of HSDP: the shards of a tensor are taken from the same replica of the mesh."""
    splits = [Split(None), Split(0)]
    mesh = Mesh((2, 2), ((0, 1, 2, 3),), tuple(splits if axis == 0 else reversed(splits)))
    replicas = [{0, 1}, {2, 3}] if axis == 0 else [{0, 2}, {1, 3}]
    specs = [TensorSpec((8, GRAIN), torch.uint8, mesh)] * 4
    records = [(n, n, (1 + 8 * n) * GRAIN, specs[n].nbytes) for n in range(4)]
    plan = FilePlan(33 * GRAIN, records, [0, 1, 2, 3])
    assert not check(plan, specs, 4, GRAIN)
    made = [Schedule(plan, specs, rank, 4, GRAIN) for rank in range(4)]
    for number in range(4):
        have = {
            rank
            for rank, one in enumerate(made)
            if any(piece.source == number for piece in one.own_pieces())
        }
        assert have == replicas[number % 2]


@pytest.mark.parametrize("cuts_replicas", [False, True])
@pytest.mark.parametrize("writers", [[0], [0, 2], [0, 1, 2, 3]])
def test_flat_ranges_are_of_one_replica(writers: list[int], cuts_replicas: bool) -> None:
    """Nobody compares them: neither who writes nor what was compared else mixes replicas."""
    half = 20 * GRAIN
    held = Flat(tuple((rank, rank % 2 * half, (rank % 2 + 1) * half) for rank in range(4)))
    spec = TensorSpec((2 * half,), torch.uint8, held)
    plan = FilePlan(0, [], writers, cuts_replicas=cuts_replicas)
    for source in range(8):
        taken = {rank for one in plan.cover(source, spec, 4).segments for rank in one.ranks}
        assert taken in ({0, 1}, {2, 3})


def test_boxes_side_by_side_are_no_run() -> None:
    """A rank may hold neighbouring rows apart, as a strided shard of a mesh of one rank."""
    spec = TensorSpec((512, 4096), torch.float32, Mesh((1,), ((0,),), (Split(0, 2),)))
    assert len(cover_of(spec.shape, spec.held, 2).held) == 2
    made = Schedule(FilePlan(spec.nbytes, [(0, 0, 0, spec.nbytes)], [0]), [spec], 0, 2, GRAIN)
    assert not list(made.own_pieces())
    check(FilePlan(spec.nbytes + 900, [(0, 0, 640, spec.nbytes)], [0, 1]), [spec], 2, GRAIN)
