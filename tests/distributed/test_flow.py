"""The way of a load's bytes, many ranks in one process: each a thread, messages in queues."""

from __future__ import annotations

import queue
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fastserial.distributed.onefile import flow
from fastserial.distributed.plan import owners
from fastserial.distributed.plan.matching import TensorMatch, file_leaves
from fastserial.distributed.plan.owners import Wanted, divide_reads
from fastserial.distributed.reading.part_reader import PartReader
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.file_index import FileIndex, FileTensor, index_of_file
from fastserial.distributed.sharding.pieces import Holding, TensorSpec
from fastserial.loading.reader import FastFileReader


class Post:
    """What lies between the ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._queues: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)

    def between(self, sender: int, receiver: int) -> queue.Queue[Any]:
        with self.lock:
            return self._queues[sender, receiver]


class Traffic:
    """One rank's connections, as `group.Traffic` has them."""

    def __init__(self, post: Post, rank: int, size: int) -> None:
        self.post, self.rank, self.size = post, rank, size

    def send(self, rank: int, data: torch.Tensor) -> Callable[[], None]:
        self.post.between(self.rank, rank).put(data.clone())
        return lambda: None

    def alive(self) -> None:
        pass

    def agree(self) -> None:
        pass

    def receive(self, rank: int, data: torch.Tensor) -> Callable[[], None]:
        def wait() -> None:
            data.copy_(self.post.between(rank, self.rank).get(timeout=20))

        return wait


def random_tensors(chance: random.Random) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for number in range(chance.randrange(1, 6)):
        shape = [chance.randrange(1, 40) for _ in range(chance.randrange(4))]
        count = torch.Size(shape).numel()
        dtype = chance.choice([torch.float32, torch.int64, torch.uint8, torch.complex128])
        base = torch.randint(0, 200, (count + 9,)).to(dtype)
        one = base[chance.randrange(9) :][:count].view(shape)
        if one.dim() > 1 and chance.random() < 0.4:
            one = one.transpose(0, chance.randrange(1, one.dim()))
        if one.dim() and chance.random() < 0.3:
            one = one[chance.randrange(one.shape[0]) :: chance.randrange(1, 3)]
        if found and chance.random() < 0.2:
            one = chance.choice(list(found.values()))
        found[f"t{number}"] = one
    return found


def random_holding(chance: random.Random, full: torch.Tensor) -> Holding:
    """Return a holding of one or two random boxes, sometimes in another order in memory."""
    local = torch.zeros_like(full, memory_format=torch.contiguous_format)
    if full.dim() > 1 and chance.random() < 0.3:
        local = local.transpose(0, 1).contiguous().transpose(0, 1)
    parts: list[tuple[Box, torch.Tensor]] = []
    for _ in range(chance.randrange(1, 3)):
        cuts = [sorted(chance.sample(range(size + 1), 2)) for size in full.shape]
        box = Box(tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts))
        if chance.random() < 0.3:
            box = Box((0,) * full.dim(), tuple(full.shape))
        view = local[box.slices(Box((0,) * full.dim(), tuple(full.shape)))]
        parts.append((box, view if chance.random() < 0.7 else torch.zeros_like(view)))
    return Holding(TensorSpec(tuple(full.shape), full.dtype), local, parts)


def load(
    index: FileIndex, path: Path, traffic: Any, jobs: list[TensorMatch], wanted: list[Wanted]
) -> int:
    """Load as `loader` does; `wanted` is of every rank."""
    grids = flow.grids_of(file_leaves(index.value))
    targets, odd = flow.targets_of(jobs, grids)
    records = [one for one in index.records if one.crc is not None]
    with FastFileReader(path) as reader:
        parts = PartReader(reader, records if traffic.rank % 2 else ())
        moves = flow.Flow(traffic, parts, grids)
        shares = divide_reads(grids, wanted)
        parts.read_own([targets[index] for index in shares.alone[traffic.rank]])
        flow.read_odd(odd, reader)
        moves.share(shares.common, wanted, targets)
    for piece in parts.ledger.pieces():  # what is known of a whole record is right
        record = records[piece.record]
        assert piece.length != record.nbytes or piece.crc == record.crc
    return moves.exchange.sent_bytes


@pytest.mark.parametrize("legacy", [False, True])
def test_bytes_reach_whoever_wants_them(tmp_path: Path, legacy: bool) -> None:
    sent = 0
    for seed in range(30):
        torch.manual_seed(seed)
        chance = random.Random(seed)
        size = chance.randrange(1, 5)
        tensors = random_tensors(chance)
        path = tmp_path / "x.pt"
        torch.save(tensors, path, _use_new_zipfile_serialization=not legacy)
        with path.open("rb") as file:
            index = index_of_file(file.fileno(), str(path))
        held = [
            {key: random_holding(chance, full) for key, full in tensors.items()}
            for _ in range(size)
        ]
        jobs = [[TensorMatch(index.value[key], one) for key, one in mine.items()] for mine in held]
        grids = flow.grids_of(file_leaves(index.value))
        finest, window = chance.choice([64, 512, 4096]), chance.choice([4096, 2**20])
        wanted = [flow.wanted_of(flow.targets_of(mine, grids)[0]) for mine in jobs]
        post, failures = Post(), []

        def rank(number: int, *rest: Any) -> None:
            nonlocal sent
            traffic, mine, everyone, place, what, failed = rest
            try:
                sent += load(what, place, traffic, mine, everyone)
            except BaseException as error:
                failed.append((number, error))

        with (
            mock.patch.object(flow, "_LARGEST_WINDOW", window),
            mock.patch.object(owners, "_FINEST", finest),
        ):
            threads = [
                threading.Thread(
                    target=rank,
                    args=(n, Traffic(post, n, size), jobs[n], wanted, path, index, failures),
                )
                for n in range(size)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures, (seed, failures)
        for mine in held:
            for key, one in mine.items():
                whole = Box((0,) * tensors[key].dim(), tuple(tensors[key].shape))
                for box, view in one.parts:
                    assert torch.equal(view, tensors[key][box.slices(whole)]), (seed, key, box)
    assert sent


def test_a_tensor_that_is_no_array_has_no_grid() -> None:
    def leaf(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[Any, Any]]:
        return [(("a",), FileTensor(0, torch.float32, shape, stride, 64))]

    assert flow.grids_of(leaf((4, 4), (4, 1)))[0].shape == (4, 4)
    assert flow.grids_of(leaf((4, 3), (1, 4)))[0].order == (1, 0)
    assert flow.grids_of(leaf((1, 4, 3), (7, 1, 4)))[0].shape == (3, 4, 1)
    for shape, stride in (((4, 4), (9, 1)), ((4, 3), (6, 2)), ((4, 3), (0, 1)), ((4, 4), (2, 1))):
        assert not flow.grids_of(leaf(shape, stride)), "gaps, or elements twice"
    assert not flow.grids_of(leaf((0, 3), (3, 1)))


def test_each_element_has_one_reader() -> None:
    """And nobody reads what only others want, but for what lies between small boxes."""
    grid = flow.grids_of([(("a",), FileTensor(0, torch.uint8, (4096,), (1,), 64))])
    boxes = [Box((0,), (1000,)), Box((1000,), (1000,)), Box((500,), (900,)), Box((3000,), (400,))]
    with mock.patch.object(owners, "_FINEST", 64):
        shares = divide_reads(grid, [[(0, box)] for box in boxes])
    assert shares.alone == [[], [], [], [0]]
    assert {share.members for share in shares.common} == {(0, 1, 2)}
    ends = [(share.first, share.stop) for share in shares.common]
    assert (ends[0][0], ends[-1][1]) == (0, 2000)
    assert all(before[1] == after[0] for before, after in pairwise(ends))
    shares = divide_reads(grid, [[(0, box)] for box in boxes])
    assert shares.alone == [[], [], [], []]
    assert [share[1:3] for share in shares.common] == [(0, 3400)]
