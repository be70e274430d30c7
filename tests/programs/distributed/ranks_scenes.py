"""A rank of a job that meets what is unusual: `SCENE FOLDER`.

Targets and groups as stock has them beside it; FSDP1; a rank that is lost in a load.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import ranks
from support.sharded import noise, same_bytes, split
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

from fastserial import Checkpointer, ConfigError, distributed, last_save_report, options
from fastserial.distributed import FastSavePlanner, FastStorageReader, FastStorageWriter, FlatShard
from fastserial.distributed.load import read_plan, reader
from fastserial.errors import DistributedError
from fastserial.integrations.fastpersist import fastpersist_save

# -- targets ---------------------------------------------------------------------------------------

FULL = {"step": 3, "rows": noise([1000, 700], torch.float32, 1)}


def state() -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return {"step": 3, "rows": distribute_tensor(FULL["rows"], mesh, [Shard(0)])}


def seen(path: Path) -> Any:
    """Return a file's bytes, what else it has, and what is beside it."""
    found = os.lstat(path)
    extended = {name: os.getxattr(path, name) for name in sorted(os.listxattr(path))}
    mode = stat.filemode(found.st_mode), found.st_uid, found.st_gid
    return path.read_bytes(), mode, extended, sorted(os.listdir(path.parent))


def new(path: Path) -> None:
    """There is no file."""


def private(path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o600)
    os.setxattr(path, "user.note", b"keep me")


def link(path: Path) -> None:
    real = path.parent / "below" / "real.bin"
    real.parent.mkdir()
    real.write_bytes(b"old" * 1000)
    path.symlink_to("below/real.bin")


def as_stock(folder: Path, prepare: Callable[[Path], object], umask: int) -> None:
    """Save over a file that was prepared, beside stock, and compare all of the two files."""
    ours, theirs = folder / "ours" / "file.pt", folder / "theirs" / "file.pt"

    def prepared() -> None:
        for path in (ours, theirs):
            path.parent.mkdir(parents=True)
            prepare(path)

    ranks.alone(prepared)
    os.umask(umask)
    for durable in (True, False):
        with options(durable=durable):
            distributed.save(state(), ours, timeout=30)
        report = last_save_report()
        assert dist.get_rank() or (report is not None and report.fallback is None)
        assert report is None or report.durable is durable
        dist.barrier()
    ranks.alone(lambda: torch.save(FULL, theirs))
    assert seen(ours) == seen(theirs)
    os.umask(0o22)


def held(path: Path) -> None:
    """Rank 0 has the file open: a new file would not be what its descriptor shows."""
    ranks.alone(lambda: path.write_bytes(b"old"))
    with path.open("r+b") if dist.get_rank() == 0 else contextlib.nullcontext():
        with pytest.raises(DistributedError, match="this process has the file open") as caught:
            distributed.save(state(), path, timeout=30)
        assert caught.value.rank == 0
        assert str(path) in str(caught.value)
        assert "Save to another path" in str(caught.value)
        dist.barrier()
        assert path.read_bytes() == b"old"
        assert os.listdir(path.parent) == [path.name]
        dist.barrier()
    distributed.save(state(), path, timeout=30)
    dist.barrier()
    assert same_bytes(torch.load(path)["rows"], FULL["rows"])


def targets(folder: str) -> None:
    for prepare, umask in ((new, 0o137), (private, 0), (link, 0o22)):
        as_stock(Path(folder, prepare.__name__), prepare, umask)
    ranks.alone(Path(folder, "held").mkdir)
    held(Path(folder, "held", "file.pt"))


# -- groups ----------------------------------------------------------------------------------------

GROUPS = [[0, 1], [2, 3], [1, 2], [0, 2, 3], [0, 1, 2, 3]]


def group_state(members: list[int], group: Any, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state whose shards the ranks of a group hold, and the whole of it."""
    full = noise([400, 301], torch.float32, seed)
    flat = noise([90_000], torch.bfloat16, seed + 1)
    step = -(-90_000 // len(members))
    first = members.index(dist.get_rank()) * step
    part = flat[first : first + step].clone()
    shard = FlatShard((90_000,), flat.dtype, first, len(part), part)
    rows = split(full, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    return {"w": rows, "f": shard, "n": seed}, {"w": full, "f": flat, "n": seed}


def check(path: Path, whole: dict[str, Any]) -> None:
    stock = path.parent / "stock" / path.name
    stock.parent.mkdir(exist_ok=True)
    torch.save(whole, stock)
    assert path.read_bytes() == stock.read_bytes(), path


def groups(place: str) -> None:
    """Two groups at once, with different numbers of saves; groups that overlap; all ranks.

    And all of it again with a new process group.
    """
    folder, rank = Path(place), dist.get_rank()
    for turn in range(2):
        made = [dist.new_group(members) for members in GROUPS]
        for seed, (members, group) in enumerate(zip(GROUPS, made, strict=True)):
            if rank not in members:
                continue
            path = folder / f"{members}.pt"
            for number in range(1 + rank // 2 if seed < 2 else 2):
                state, whole = group_state(members, group, 100 * seed + 10 * turn + number)
                distributed.save(state, path, group=group, timeout=60)
                if rank == members[0]:
                    check(path, whole)
                into, _ = group_state(members, group, 7)
                distributed.load(path, into, group=group, timeout=60)
                assert same_bytes(into["f"].tensor, state["f"].tensor)
                assert into["n"] == state["n"]
            by_fastpersist(folder, state, whole, group)
            by_dcp(folder, state, group)
        dist.barrier()
        # A failure in one group is no other group's.
        members, group = (GROUPS[0], made[0]) if rank < 2 else (GROUPS[1], made[1])
        state, _ = group_state(members, group, 50)
        if rank == 1:
            state["more"] = torch.zeros(2)
        if rank > 1:
            distributed.save(state, folder / f"{members}.pt", group=group, timeout=60)
        else:
            with pytest.raises(DistributedError) as caught:
                distributed.save(state, folder / f"{members}.pt", group=group, timeout=60)
            assert caught.value.rank == 1
        dist.barrier()
        dist.destroy_process_group()
        os.environ["FASTSERIAL_TEST_STORE"] += "again"
        ranks.join()


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
    members = dist.get_process_group_ranks(group)
    path = folder / f"dcp {members}"
    into = {"w": torch.zeros_like(state["w"]), "n": 0}
    dcp.save(
        {"w": state["w"], "n": state["n"]},
        storage_writer=FastStorageWriter(path),
        planner=FastSavePlanner(),
        process_group=group,
    )
    dcp.load(into, storage_reader=FastStorageReader(path), process_group=group)
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dcp.save(
            {"mine": rank},
            storage_writer=FastStorageWriter(f"{path}, others"),
            planner=FastSavePlanner(),
            process_group=group,
        )
    texts = [str(one.message) for one in found if "differ" in str(one.message)]
    names = ", ".join(map(str, members[1:]))
    assert [f"{names} differ" in text for text in texts] == [True] * (rank == members[0]), texts
    assert same_bytes(into["w"].to_local(), state["w"].to_local())
    assert into["n"] == state["n"]


# -- FSDP1 -----------------------------------------------------------------------------------------

State = dict[str, nn.Module | torch.optim.Optimizer]


def trained(seed: int, sharded: bool = True) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh
    )
    adam = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 7)).sum().backward()
    adam.step()
    return {"m": wrapped, "o": adam}


def whole(state: State, path: Path) -> bytes:
    distributed.save(state, path)
    dist.barrier()
    return path.read_bytes()


def fsdp1(place: str) -> None:
    """It is saved with a device mesh, and refused without."""
    folder = Path(place)
    path = folder / "state.pt"
    with pytest.raises(ConfigError, match=r"0\.weight is a ShardedTensor.*device_mesh"):
        distributed.save(trained(1, sharded=False), path)
    state = trained(2)
    before = whole(state, path)
    with Checkpointer(folder / "steps", state) as checkpoints:
        checkpoints.save(1)
    loaded, resumed = trained(3), trained(4)
    distributed.load(path, loaded)
    with Checkpointer(folder / "steps", resumed) as checkpoints:
        assert checkpoints.resume() == 1
    assert whole(loaded, path) == whole(resumed, path) == before
    distributed.save(state["m"], folder / "hf", format="safetensors", shard_nbytes=100)
    index = json.loads((folder / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == 7 * 5 + 5 + 5 * 3 + 3


# -- a rank that is lost ---------------------------------------------------------------------------


def lost(place: str, how: str) -> None:
    """The last rank dies or stops in a load; the others print what they are told, and when."""
    folder, rank, last = Path(place), dist.get_rank(), dist.get_world_size() - 1
    ranks.alone(lambda: torch.save({"a": torch.arange(200_000)}, folder / "state.pt"))
    into = {"a": torch.zeros(200_000, dtype=torch.int64)}
    distributed.load(folder / "state.pt", into, timeout=60)  # so that all connections are there
    turn = reader.Flow._step

    def ending(self: reader.Flow, group: Any, number: int, ahead: Any) -> None:
        if rank == last and number == 1:
            (folder / "lost").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)
        turn(self, group, number, ahead)

    with (
        mock.patch.object(read_plan, "_LARGEST_WINDOW", 64 * 1024),
        mock.patch.object(reader.Flow, "_step", ending),
    ):
        began = time.monotonic()
        try:
            distributed.load(folder / "state.pt", into, timeout=5)
        except DistributedError as error:
            print(f"{error.rank}|{time.monotonic() - began}|{error}", flush=True)
    (folder / f"heard{rank}").touch()
    if rank == 0 and how == "stop":
        while not all((folder / f"heard{other}").exists() for other in range(last)):
            time.sleep(0.02)
        os.kill(int((folder / "lost").read_text()), signal.SIGKILL)
    os._exit(0)  # the job's own group has lost a rank


ranks.main(globals())
