"""A rank: checks what `pieces` says of random DTensors. Arguments: seed, number of cases."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch.distributed as dist
from support.ranks import join
from support.sharded import meshes, random_dtensor, random_tensor, same_bytes, strided

from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.pieces import (
    boxes_on,
    fits,
    holding,
    in_other_order,
    is_ambiguous,
)


def main() -> None:
    rank, count = join()
    chance = random.Random(int(sys.argv[1]))
    ranks = {number: number for number in range(count)}
    grids = meshes(count)
    seen = {"strided": 0, "ambiguous": 0, "split": 0}
    for case in range(int(sys.argv[2])):
        full = random_tensor(chance)
        mesh = chance.choice(grids)
        make = strided if full.dim() and case % 3 == 0 else random_dtensor
        leaf = make(chance, full, mesh)
        held = holding(leaf, f"case {case}", rank, ranks)
        spec = held.spec
        if is_ambiguous(spec):
            seen["ambiguous"] += 1
            votes: list[Any] = [None] * count
            fit = fits(spec, rank, tuple(held.local.shape))
            dist.all_gather_object(votes, (spec.held.right_first, fit))
            assert len({vote[0] for vote in votes}) == 1 or make is random_dtensor, votes
            if make is strided:
                assert votes[0] == (True, True), (case, votes)
        seen["strided"] += any(split.factor > 1 for split in spec.held.splits)
        seen["split"] += len(held.parts) > 1
        # What every rank says of itself is what the others say of it.
        mine = [box for box, _ in held.parts]
        told: list[Any] = [None] * count
        dist.all_gather_object(told, mine)
        agreed = spec
        if told != [boxes_on(spec, other) for other in range(count)]:
            agreed = in_other_order(spec)
        assert told == [boxes_on(agreed, other) for other in range(count)], (case, leaf)
        # And the bytes are those of the whole tensor.
        nothing = Box((0,) * full.dim(), tuple(full.shape))
        total = 0
        for box, view in held.parts:
            assert same_bytes(view, full[box.slices(nothing)]), (case, leaf.placements, box)
            total += view.numel()
        assert total == held.local.numel(), case
    print(seen)


main()
