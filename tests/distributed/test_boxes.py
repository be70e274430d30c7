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


def elements(whole: torch.Tensor, box: Box) -> list[int]:
    part = whole[box.slices(Box((0,) * whole.dim(), tuple(whole.shape)))]
    found: list[int] = part.flatten().tolist()
    return found


def random_box(chance: random.Random, shape: tuple[int, ...]) -> Box:
    offsets = tuple(chance.randint(0, size) for size in shape)
    sizes = tuple(
        chance.randint(0, size - offset) for size, offset in zip(shape, offsets, strict=True)
    )
    return Box(offsets, sizes)


def test_boxes_and_ranges_have_the_elements_that_they_say() -> None:
    chance = random.Random(1)
    runs = 0
    for _ in range(1500):
        shape = tuple(chance.choices(range(5), k=chance.randrange(5)))
        numel = prod(shape)
        whole = torch.arange(numel).view(shape)
        first, stop = sorted(chance.randint(0, numel) for _ in range(2))
        boxes = boxes_of_range(shape, first, stop)
        assert [n for box in boxes for n in elements(whole, box)] == list(range(first, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        box, other = random_box(chance, shape), random_box(chance, shape)
        mine = elements(whole, box)
        shared = intersect(box, other)
        found = elements(whole, shared) if shared is not None else []
        assert sorted(found) == sorted({*mine} & {*elements(whole, other)})
        if not box.numel:
            continue
        found = [n for part in within(shape, box, first, stop) for n in elements(whole, part)]
        assert found == [n for n in mine if first <= n < stop]
        begin, end = span_of(shape, box)
        assert (begin, end - 1) == (mine[0], mine[-1])
        run = run_of(shape, box)
        assert (run is not None) == (mine == list(range(mine[0], mine[0] + len(mine))))
        assert run is None or mine == list(range(*run))
        runs += run is not None
    assert runs > 200
