"""The arithmetic of boxes, against indexing a real tensor."""

from __future__ import annotations

import random
from math import prod

import torch

from fastserial.distributed.sharding.boxes import (
    Box,
    boxes_of_range,
    intersect,
    run_of,
    span_of,
    within,
)


def shapes(seed: int, count: int) -> list[tuple[int, ...]]:
    chance = random.Random(seed)
    return [tuple(chance.choices(range(5), k=chance.randrange(5))) for _ in range(count)]


def elements(whole: torch.Tensor, box: Box) -> list[int]:
    return whole[box.slices(Box((0,) * whole.dim(), tuple(whole.shape)))].flatten().tolist()


def test_a_range_is_few_boxes_in_its_order() -> None:
    chance = random.Random(1)
    for shape in shapes(2, 600):
        numel = prod(shape)
        first = chance.randint(0, numel)
        stop = chance.randint(first, numel)
        whole = torch.arange(numel).view(shape)
        boxes = boxes_of_range(shape, first, stop)
        found = [number for box in boxes for number in elements(whole, box)]
        assert found == list(range(first, stop)), (shape, first, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_two_boxes_share_what_both_have() -> None:
    chance = random.Random(3)
    for shape in shapes(4, 400):
        whole = torch.arange(prod(shape)).view(shape)
        a, b = (random_box(chance, shape) for _ in range(2))
        shared = intersect(a, b)
        found = elements(whole, shared) if shared is not None else []
        assert sorted(found) == sorted(set(elements(whole, a)) & set(elements(whole, b)))


def random_box(chance: random.Random, shape: tuple[int, ...]) -> Box:
    offsets = tuple(chance.randint(0, size) for size in shape)
    sizes = tuple(
        chance.randint(0, size - offset) for size, offset in zip(shape, offsets, strict=True)
    )
    return Box(offsets, sizes)


def test_the_parts_of_a_box_in_a_range() -> None:
    chance = random.Random(5)
    for shape in shapes(6, 400):
        numel = prod(shape)
        first = chance.randint(0, numel)
        stop = chance.randint(first, numel)
        box = random_box(chance, shape)
        if not box.numel:
            continue
        whole = torch.arange(numel).view(shape)
        found = [n for part in within(shape, box, first, stop) for n in elements(whole, part)]
        assert found == [n for n in elements(whole, box) if first <= n < stop]
        begin, end = span_of(shape, box)
        assert (begin, end - 1) == (elements(whole, box)[0], elements(whole, box)[-1])


def test_a_box_that_is_one_run() -> None:
    chance = random.Random(7)
    runs = 0
    for shape in shapes(8, 600):
        box = random_box(chance, shape)
        if not box.numel:
            continue
        found = elements(torch.arange(prod(shape)).view(shape), box)
        run = run_of(shape, box)
        assert (run is not None) == (found == list(range(found[0], found[0] + len(found))))
        if run is not None:
            runs += 1
            assert found == list(range(*run))
    assert runs > 100
