"""Who writes what into a folder of DCP: every row once, by a rank that has it, and equal bytes."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fastserial.distributed.dcp.planners import divide

ROWS, ROW = 128, 8192  # of a MiB
SHAPES = {
    "a GPT with the embedding last": [1, 1, 1, 4, 4] * 20 + [300],
    "many": [1] * 1000,
    "weights and biases": [8, 1] * 100,
    "nothing at the end": [1, 1, 1, 1, 0],
}


def item(key: str, rows: int, first: int = 0, of: int = 0) -> WriteItem:
    """Return so many rows from one on of a tensor, by default all of it."""
    size = torch.Size((of or rows, ROW))
    chunk = ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((rows, ROW)))
    data = TensorWriteData(chunk, TensorProperties(torch.uint8), size)
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def rows_of(plan: SavePlan) -> list[tuple[str, int, int]]:
    found = []
    for one in plan.items:
        assert one.tensor_data is not None
        chunk = one.tensor_data.chunk
        assert chunk.sizes[1] == ROW
        found.append((one.index.fqn, chunk.offsets[0], chunk.sizes[0]))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_that_have_the_same_write_as_much(name: str) -> None:
    """As far as whole tensors allow it."""
    items = [item(str(number), rows * ROWS) for number, rows in enumerate(SHAPES[name])]
    whole = {one.index.fqn for one in items}
    found = divide([SavePlan(list(items)) for _ in range(4)], range(4), False, whole, set())
    load = [sum(rows for _, _, rows in rows_of(plan)) for plan in found]
    assert max(load) <= ROWS * (sum(SHAPES[name]) / 4 + max(SHAPES[name]))


def test_a_tensor_is_of_one_replica() -> None:
    """HSDP: ranks 0 and 1 are one replica, 2 and 3 the other; 1 and 3 have no part of some."""
    chance = random.Random(5)
    for _ in range(50):
        held: list[list[WriteItem]] = [[], [], [], []]
        for number in range(chance.randrange(2, 12)):
            rows, is_cut = chance.randrange(1, 20), chance.random() < 0.7
            for rank in range(4):
                if is_cut:
                    held[rank].append(item(str(number), rows, rank % 2 * rows, 2 * rows))
                elif rank % 2 == 0:
                    held[rank].append(item(str(number), rows))
        found = divide([SavePlan(items) for items in held], range(4), False, set(), set())
        replicas: dict[str, set[int]] = {}
        for rank, plan in enumerate(found):
            for key, _, _ in rows_of(plan):
                replicas.setdefault(key, set()).add(rank // 2)
        assert all(len(some) == 1 for some in replicas.values()), replicas


def test_every_row_is_written_once() -> None:
    chance = random.Random(3)
    for _ in range(100):
        ranks = chance.randrange(1, 6)
        held: list[list[WriteItem]] = [[] for _ in range(ranks)]
        rows: dict[str, tuple[int, set[int]]] = {}
        for number in range(chance.randrange(20)):
            owners = chance.sample(range(ranks), chance.randrange(1, ranks + 1))
            rows[str(number)] = chance.randrange(1, 9) * ROWS, set(owners)
            for rank in owners:
                held[rank].append(item(str(number), rows[str(number)][0]))
        whole = {key for key in rows if chance.random() < 0.5}
        lowest = chance.random() < 0.2
        found = divide([SavePlan(some) for some in held], range(ranks), lowest, whole, set())
        written = sorted(
            (key, first, first + count, rank)
            for rank, plan in enumerate(found)
            for key, first, count in rows_of(plan)
        )
        for key, (count, owners_of) in rows.items():
            mine = [one for one in written if one[0] == key]
            assert [one[1] for one in mine] == [0, *(one[2] for one in mine[:-1])]
            assert mine[-1][2] == count
            assert {one[3] for one in mine} <= owners_of
            assert len(mine) == 1 or key not in whole
