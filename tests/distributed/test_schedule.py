"""What each rank writes, sends and receives in a save: by arithmetic, without processes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch

from fastserial.distributed.plan.division import GRAIN, cover_of
from fastserial.distributed.plan.schedule import (
    CONTAINER,
    FilePlan,
    FileRange,
    Move,
    Schedule,
    schedule,
)
from fastserial.distributed.ranks.exchange import packed
from fastserial.distributed.sharding.boxes import Box
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
        splits = tuple(Split(chance.choice([None, 0, 1])) for _ in grid)
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
    return FilePlan(at + 50, records, writers), specs


def has(spec: TensorSpec, size: int, rank: int, piece: FileRange) -> bool:
    """Return whether a rank has a piece as it is in the file."""
    item = spec.dtype.itemsize
    runs = cover_of(spec.shape, spec.held, size).runs
    first, stop = piece.start, piece.start + piece.length
    return any(
        rank in run.ranks and run.first * item <= first and stop <= run.stop * item for run in runs
    )


def check(plan: FilePlan, specs: list[TensorSpec], size: int, tile: int) -> int:
    """Check the schedules of all ranks; return how many bytes travel."""
    made = [schedule(plan, specs, rank, size, tile) for rank in range(size)]
    written: list[tuple[int, int]] = []
    for rank, one in enumerate(made):
        mine = 0
        for piece in one.locals():
            written.append((piece.offset, piece.length))
            mine += piece.length
            alone = piece.source < 0
            assert rank == 0 if alone else has(specs[piece.source], size, rank, piece), piece
        rounds = {number: one.round(number) for number in one.rounds}
        for found in rounds.values():
            assert sum(piece.length for piece, _ in found.pieces) <= tile + GRAIN
            written += [(piece.offset, piece.length) for piece, _ in found.pieces]
            mine += sum(piece.length for piece, _ in found.pieces)
            places = sorted((at, at + piece.length) for piece, at in found.pieces)
            assert all(a[1] <= b[0] for a, b in pairwise(places))
            assert all(at % 16 == 0 for at, _ in places)
        assert one.nbytes == mine
    at = 0
    for offset, length in sorted(written):
        assert offset == at, "a gap, or twice"
        at += length
    assert at == plan.nbytes
    blocks = [-(-made[rank].nbytes // GRAIN) for rank in plan.writers]
    assert max(blocks) - min(blocks) <= 1
    return exchanged(made, specs)


def exchanged(made: list[Schedule], specs: list[TensorSpec]) -> int:
    """Check that what one sends another expects, and that all of a tile comes."""
    moved = 0
    for rank, one in enumerate(made):
        for number in one.rounds:
            found = one.round(number)
            for other, moves in found.sends.items():
                there = made[other].round(number).receives[rank]
                if there != moves:
                    assert same_elements(moves, there, specs)
                    assert packed(views(moves, specs)) == packed(views(there, specs))
            arrived: dict[FileRange, int] = {}
            for other, moves in found.receives.items():
                assert made[other].round(number).sends[rank]
                for move in moves:
                    nbytes = bytes_of(move, specs)
                    arrived[move.piece] = arrived.get(move.piece, 0) + nbytes
                    moved += nbytes * (other != rank)
            assert arrived == {piece: piece.length for piece, _ in found.pieces}
    return moved


def same_elements(sent: list[Move], wanted: list[Move], specs: list[TensorSpec]) -> bool:
    """Return whether the same elements come in the same order; how they are cut does not matter."""
    columns = []
    for moves in (sent, wanted):
        found = []
        for move in moves:
            spec, part = specs[move.piece.source], move.part
            if part is None:
                elements = move.piece.offset + torch.arange(move.piece.length)
            else:
                numel = torch.Size(spec.shape).numel()
                slices = part.slices(Box((0,) * len(spec.shape), spec.shape))
                elements = torch.arange(numel).view(spec.shape)[slices].flatten()
            records = torch.full_like(elements, move.piece.record)
            found.append(torch.stack([records, elements]))
        columns.append(torch.cat(found, 1))
    return torch.equal(*columns)


def views(moves: list[Move], specs: list[TensorSpec]) -> list[torch.Tensor]:
    """Return what is like the views that are sent."""
    sizes = [move.part.sizes if move.part else (move.piece.length,) for move in moves]
    dtypes = [specs[move.piece.source].dtype if move.part else torch.uint8 for move in moves]
    return [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(sizes, dtypes, strict=True)
    ]


def bytes_of(move: Move, specs: list[TensorSpec]) -> int:
    if move.part is None:
        assert move.piece.source < 0
        assert move.piece.record == CONTAINER or move.piece.source < 0
        return move.piece.length
    return move.part.numel * specs[move.piece.source].dtype.itemsize


def test_all_of_the_file_once_in_equal_shares() -> None:
    chance = random.Random(5)
    moved = 0
    for _ in range(120):
        size = chance.choice([1, 2, 4, 6])
        moved += check(*random_plan(chance, size), size, chance.choice([GRAIN, 4 * GRAIN]))
    assert moved > 100 * GRAIN


def test_sender_and_owner_cut_at_different_places() -> None:
    """A sender leaves out blocks of which it has nothing, and the owner joins all it puts together.

    So what one sees as a run of rows is several for the other.
    """
    chance = random.Random(2)
    for case in range(8):
        rows, columns = chance.randrange(300, 900), chance.randrange(300, 900)
        splits = chance.choice([(Split(0, 2), Split(0)), (Split(0, 2), Split(1)), (Split(1),) * 2])
        if case % 2:
            rows, columns = chance.randrange(3, 20), chance.randrange(20_000, 60_000)
            splits = Split(1, 2), Split(1)
        held = Mesh((2, 2), ((0, 1, 2, 3),), splits)
        specs = [TensorSpec((rows, columns), torch.int64, held)] * 2
        nbytes = specs[0].nbytes
        records = [(0, 0, 640, nbytes), (1, 1, 640 + nbytes + -nbytes % 64 + 128, nbytes)]
        check(FilePlan(records[1][2] + nbytes + 500, records, list(range(4))), specs, 4, 1 << 30)
