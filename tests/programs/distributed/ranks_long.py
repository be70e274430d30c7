"""A rank of four: groups of some ranks, many saves. Arguments: folder, case."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from support.sharded import noise, same_bytes, split
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed
from fastserial.distributed import FlatShard
from fastserial.errors import DistributedError

MIB = 2**20


def group_state(ranks: list[int], group: Any, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state whose shards the ranks of a group hold, and the whole of it."""
    full = noise([400, 301], torch.float32, seed)
    flat = noise([90_000], torch.bfloat16, seed + 1)
    mesh = DeviceMesh.from_group(group, "cpu")
    at = ranks.index(dist.get_rank())
    step = -(-90_000 // len(ranks))
    first, stop = at * step, min((at + 1) * step, 90_000)
    shard = FlatShard((90_000,), flat.dtype, first, stop - first, flat[first:stop].clone())
    return {"w": split(full, mesh, [Shard(0)]), "f": shard, "n": seed}, {
        "w": full,
        "f": flat,
        "n": seed,
    }


def check(path: Path, whole: dict[str, Any]) -> None:
    stock = path.parent / "stock" / path.name
    stock.parent.mkdir(exist_ok=True)
    torch.save(whole, stock)
    assert path.read_bytes() == stock.read_bytes(), path


def groups(folder: Path) -> None:
    """Two groups at once, with different numbers of saves; groups that overlap; then all ranks."""
    rank = dist.get_rank()
    pairs = [[0, 1], [2, 3], [1, 2], [0, 2, 3], [0, 1, 2, 3]]
    made = [dist.new_group(ranks) for ranks in pairs]
    for seed, (ranks, group) in enumerate(zip(pairs, made, strict=True)):
        if rank not in ranks:
            continue
        path = folder / f"{ranks}.pt"
        for turn in range(1 + rank // 2 if seed < 2 else 2):
            state, whole = group_state(ranks, group, 100 * seed + turn)
            distributed.save(state, path, group=group, timeout=60)
            if rank == ranks[0]:
                check(path, whole)
            into, _ = group_state(ranks, group, 7)
            distributed.load(path, into, group=group, timeout=60)
            assert same_bytes(into["f"].tensor, state["f"].tensor)
            assert into["n"] == state["n"]
    dist.barrier()
    # A failure in one group is no other group's.
    ranks, group = (pairs[0], made[0]) if rank < 2 else (pairs[1], made[1])
    state, whole = group_state(ranks, group, 50)
    if rank == 1:
        state["more"] = torch.zeros(2)
    try:
        distributed.save(state, folder / f"{ranks}.pt", group=group, timeout=60)
        assert rank > 1
    except DistributedError as error:
        assert rank < 2
        assert error.rank == 1
    dist.barrier()
    state, whole = group_state(pairs[4], made[4], 60)
    distributed.save(state, folder / "all.pt", timeout=60)
    if rank == 0:
        check(folder / "all.pt", whole)


def use() -> tuple[int, int, int]:
    """Return bytes of memory, descriptors and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def growth(folder: Path) -> None:
    """A hundred saves and loads, some of which fail, leave nothing behind."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    full = noise([1200, 500], torch.float32, 3)
    local = full.chunk(dist.get_world_size())[dist.get_rank()].clone()
    before = (0, 0, 0)
    for step in range(120):
        if step == 20:
            before = use()
        # Now and then another plan; the widths come again.
        rows = DTensor.from_local(local[:, : 500 - step % 3], mesh, [Shard(0)], run_check=False)
        state = {"rows": rows, "step": step}
        if step % 10 == 5 and dist.get_rank() == step // 10 % 4:
            state["more"] = torch.zeros(2)
        try:
            distributed.save(state, folder / "file.pt", timeout=60)
            distributed.load(folder / "file.pt", {"rows": rows, "step": 0}, timeout=60)
            assert step % 10 != 5
        except DistributedError:
            assert step % 10 == 5
    after = use()
    assert after[0] - before[0] < 16 * MIB, (before, after)
    assert after[1] <= before[1], (before, after)
    # Those of connections that failed end a little later.
    assert after[2] - before[2] < 4, (before, after)


CASES = (groups, growth)


def main() -> None:
    join()
    folder, name = Path(sys.argv[1]), sys.argv[2]
    {case.__name__: case for case in CASES}[name](folder)


main()
