"""A rank: loads random files into random placements. Arguments: folder, seed, cases.

The oracle is torch's own: each target is made twice, from zeros and from what was saved.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.loading import tensors
from support.nests import blank, differing, like
from support.ranks import join
from support.sharded import NEWER, Holder, meshes, noise, random_tensor

import fastserial
from fastserial.distributed import load
from fastserial.distributed.onefile import flow
from fastserial.distributed.plan import owners

_LARGE = [[300, 70], [5000], [64, 65, 9], [1, 9000], [2500, 3]]


def saved(chance: random.Random) -> dict[str, Any]:
    """Return what a file holds: plain, transposed, sliced, tied and other tensors, and values."""
    nest: dict[str, Any] = {"step": chance.randrange(100), "deep": {"list": [], "name": "x"}}
    kept: list[torch.Tensor] = []
    for number in range(chance.randrange(1, 6)):
        full = random_tensor(chance)
        if chance.random() < 0.3:
            full = noise(chance.choice(_LARGE), full.dtype, chance.randrange(2**31))
        odd = chance.random()
        if full.dim() > 1 and odd < 0.2:
            full = full.transpose(0, chance.randrange(1, full.dim()))
        elif full.dim() and odd < 0.35:
            dim = chance.randrange(full.dim())
            full = full.narrow(dim, 0, full.shape[dim] // 2)
        elif full.dim() and odd < 0.4:
            full = full.flatten()[:: chance.randrange(1, 4)]
        elif full.dim() == 1 and odd < 0.5:
            full = full.expand(3, -1)
        elif full.numel() > 8 and odd < 0.55:
            full = full.flatten().as_strided((3, 3), (2, 1))  # its elements overlap
        elif kept and odd < 0.65:
            full = chance.choice(kept)
        elif full.is_complex() and odd < 0.8:
            full = torch.ones_like(full).mul_(complex(chance.random(), 2)).conj()  # without NaNs
        kept.append(full)
        if chance.random() < 0.3:
            nest["deep"]["list"].append(full)
        else:
            nest[f"t{number}"] = full
    return nest


def main() -> None:
    rank, world = join()
    folder, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    counts = [count for count in (1, 2, 3, 4, 6, 8) if count <= world]
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    grids = {count: meshes(count) for count in counts}
    moved = verified = 0
    for case in range(cases):
        chance = random.Random(f"{seed}/{case}")
        count = chance.choice(counts)
        nest = saved(chance)
        path = folder / f"{case}.pt"
        legacy, broadcast, check = (chance.random() < p for p in (0.25, 0.7, 0.5))
        block, window = chance.choice([64, 256, 4096]), chance.choice([4096, 65536])
        legacy = legacy and not any(one.dtype in NEWER for one in tensors(nest))
        choices = chance.randrange(2**31)
        if rank == 0:
            torch.save(nest, path, _use_new_zipfile_serialization=not legacy)
        dist.barrier()
        if rank >= count:
            continue
        direct = chance.choice(["auto", True])
        into = blank(nest, Holder(choices, grids[count], zeros=True))
        want = like(nest, Holder(choices, grids[count]))
        with (
            mock.patch.object(owners, "_FINEST", block),
            mock.patch.object(flow, "_LARGEST_WINDOW", window),
            fastserial.options(verify_on_load=check, direct=direct),
        ):
            report = load(path, into, group=groups[count], broadcast=broadcast, timeout=60)
        for key in differing(into, want):
            raise AssertionError(f"seed {seed}, case {case}, {count} ranks: {key} of {nest}")
        assert report.verified <= check
        assert broadcast or not any(line.sent_bytes for line in report.ranks), report
        moved += sum(line.sent_bytes for line in report.ranks)
        verified += report.verified
    print({"moved": moved, "verified": verified})


main()
