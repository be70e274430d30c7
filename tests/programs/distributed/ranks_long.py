"""A rank of four: groups of some ranks, many saves. Arguments: folder, case."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from support.sharded import noise, same_bytes, split
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed, last_save_report
from fastserial.distributed import FastSavePlanner, FastStorageReader, FastStorageWriter, FlatShard
from fastserial.errors import DistributedError
from fastserial.integrations.fastpersist import fastpersist_save

MIB = 2**20
GROUPS = [[0, 1], [2, 3], [1, 2], [0, 2, 3], [0, 1, 2, 3]]


def group_state(ranks: list[int], group: Any, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state whose shards the ranks of a group hold, and the whole of it."""
    full = noise([400, 301], torch.float32, seed)
    flat = noise([90_000], torch.bfloat16, seed + 1)
    step = -(-90_000 // len(ranks))
    first = ranks.index(dist.get_rank()) * step
    part = flat[first : first + step].clone()
    shard = FlatShard((90_000,), flat.dtype, first, len(part), part)
    rows = split(full, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    return {"w": rows, "f": shard, "n": seed}, {"w": full, "f": flat, "n": seed}


def check(path: Path, whole: dict[str, Any]) -> None:
    stock = path.parent / "stock" / path.name
    stock.parent.mkdir(exist_ok=True)
    torch.save(whole, stock)
    assert path.read_bytes() == stock.read_bytes(), path


def groups(folder: Path) -> None:
    """Two groups at once, with different numbers of saves; groups that overlap; all ranks.

    And all of it again with a new process group.
    """
    rank = dist.get_rank()
    for turn in range(2):
        made = [dist.new_group(ranks) for ranks in GROUPS]
        for seed, (ranks, group) in enumerate(zip(GROUPS, made, strict=True)):
            if rank not in ranks:
                continue
            path = folder / f"{ranks}.pt"
            for number in range(1 + rank // 2 if seed < 2 else 2):
                state, whole = group_state(ranks, group, 100 * seed + 10 * turn + number)
                distributed.save(state, path, group=group, timeout=60)
                if rank == ranks[0]:
                    check(path, whole)
                into, _ = group_state(ranks, group, 7)
                distributed.load(path, into, group=group, timeout=60)
                assert same_bytes(into["f"].tensor, state["f"].tensor)
                assert into["n"] == state["n"]
            by_fastpersist(folder, state, whole, group)
            by_dcp(folder, state, group)
        dist.barrier()
        # A failure in one group is no other group's.
        ranks, group = (GROUPS[0], made[0]) if rank < 2 else (GROUPS[1], made[1])
        state, _ = group_state(ranks, group, 50)
        if rank == 1:
            state["more"] = torch.zeros(2)
        if rank > 1:
            distributed.save(state, folder / f"{ranks}.pt", group=group, timeout=60)
        else:
            with pytest.raises(DistributedError) as caught:
                distributed.save(state, folder / f"{ranks}.pt", group=group, timeout=60)
            assert caught.value.rank == 1
        dist.barrier()
        dist.destroy_process_group()
        os.environ["FASTSERIAL_TEST_STORE"] += "again"
        join()


def by_fastpersist(folder: Path, state: Any, whole: Any, group: Any) -> None:
    """FastPersist's function, with its number of writers."""
    for writers in (1, 2):
        path = folder / str(dist.get_process_group_ranks(group)) / f"{writers}.pt"
        path.parent.mkdir(exist_ok=True)
        found = fastpersist_save(
            state, path, show_stats=False, num_parallel_writers=writers, group=group
        )
        assert found["total_bytes"] == path.stat().st_size
        assert 0 < found["write_secs"] <= found["total_secs"]
        if dist.get_rank(group) == 0:
            check(path, whole)
            report = last_save_report()
            assert report is not None
            assert sum(part.bytes > 0 for part in report.ranks) == writers


def by_dcp(folder: Path, state: Any, group: Any) -> None:
    """By its planners: groups do not mix up their plans."""
    if torch.__version__.startswith("2.6."):
        return  # there DCP coordinates by global rank 0, which has to be in the group
    path = folder / f"dcp {dist.get_process_group_ranks(group)}"
    into = {"w": torch.zeros_like(state["w"]), "n": 0}
    dcp.save(
        {"w": state["w"], "n": state["n"]},
        storage_writer=FastStorageWriter(path),
        planner=FastSavePlanner(),
        process_group=group,
    )
    dcp.load(into, storage_reader=FastStorageReader(path), process_group=group)
    assert same_bytes(into["w"].to_local(), state["w"].to_local())
    assert into["n"] == state["n"]


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


join()
{"groups": groups, "growth": growth}[sys.argv[2]](Path(sys.argv[1]))
