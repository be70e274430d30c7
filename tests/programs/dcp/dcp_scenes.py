"""A rank of two in torch.distributed.checkpoint: `SCENE FOLDER [WHO]`; WHO is `ours` or `stock`."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import ranks
from support.nests import differing
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint import staging, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastserial
from fastserial import CorruptCheckpointError, LoadMismatchError, distributed
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
    FlatShard,
)


def mesh_of_all() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()))


def writer_of(folder: Path, who: str) -> Any:
    return FastStorageWriter(folder) if who == "ours" else dcp.FileSystemWriter(folder)


# -- each rank completes its own checkpoint --------------------------------------------------------


def each_alone(folder: str) -> None:
    """Each has a checkpoint of its own in one folder."""
    rank = dist.get_rank()

    def state_of(step: int) -> dict[str, Any]:
        return {
            "same": torch.full((300_000,), float(step)),
            "mine": torch.full((5,), float(rank + 10 * step)),
            f"of {rank}": torch.full((2, 3), step),
            "step": step,
        }

    warnings.simplefilter("ignore")
    for step in (1, 2, 3):
        writer = FastStorageWriter(folder)
        planner = FastSavePlanner() if step != 2 else None
        dcp.save(state_of(step), storage_writer=writer, planner=planner, use_collectives=False)
        dist.barrier()
        for reader_of in (FastStorageReader, dcp.FileSystemReader):
            for load_planner in (None, FastLoadPlanner()):
                found, reader = state_of(0), reader_of(folder)
                dcp.load(found, storage_reader=reader, planner=load_planner)
                assert not differing(found, state_of(step))
        dist.barrier()


# -- beside the program ----------------------------------------------------------------------------


def ways() -> list[dict[str, Any]]:
    """Return what `async_save` is told besides: a thread, a stager, a process of its own."""
    found: list[dict[str, Any]] = [{}]
    if hasattr(staging, "DefaultStager"):
        options = staging.StagingOptions(False, False, True, False)
        found.append({"async_stager": staging.DefaultStager(options)})
    if hasattr(state_dict_saver, "AsyncCheckpointerType"):  # since torch 2.7
        process = state_dict_saver.AsyncCheckpointerType.PROCESS
        found.append({"async_checkpointer_type": process})
    return found


def async_save(folder: str) -> None:
    """What is saved is changed as soon as the call returns."""
    os.environ["MASTER_ADDR"] = "localhost"  # of the writing processes' own group
    mesh = mesh_of_all()
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    model = nn.Linear(700, 300)
    shard, scalar = torch.zeros(1 << 18), torch.zeros(())
    state: dict[str, Any] = {
        "model": model,
        "shard": DTensor.from_local(shard, mesh, [Shard(0)]),
        "scalar": DTensor.from_local(scalar, mesh, [Replicate()]),
        "plain": torch.zeros(1000),
    }
    tensors = [shard, scalar, state["plain"], *(p.data for p in model.parameters())]
    for number, more in enumerate(ways()):
        path = Path(folder) / str(number)
        for step in range(1, 4):  # the third one by the plan that was kept
            for tensor in tensors:
                tensor.fill_(step)
            answer = dcp.async_save(
                state,
                storage_writer=FastStorageWriter(path),
                planner=FastSavePlanner(),
                process_group=group,
                **more,
            )
            done = getattr(answer, "upload_completion", answer)
            if hasattr(answer, "staging_completion"):
                answer.staging_completion.result()
            for tensor in tensors:
                tensor.fill_(-1)
            done.result()
            dcp.load(dict(state), storage_reader=FastStorageReader(path), planner=FastLoadPlanner())
            assert all(bool(torch.all(tensor == step)) for tensor in tensors), (number, step)
        if "async_stager" in more:
            more["async_stager"].close()


# -- a rank fails ----------------------------------------------------------------------------------


class Failing(DefaultSavePlanner):
    """Fails on rank 1, at its second tensor."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "b" and not self.is_coordinator:
            raise OSError("the disk is gone")
        return super().resolve_data(write_item)


class Broken:
    def __reduce__(self) -> Any:
        raise ValueError("cannot be pickled")


def failing(folder: str, who: str) -> None:
    """Saves over a checkpoint, and fails; prints the steps of the tensors that are loaded then."""
    rank, path, mesh = dist.get_rank(), Path(folder), mesh_of_all()

    def state_of(step: int) -> dict[str, Any]:
        shards = {key: torch.full((1 << 18,), step) for key in "abc"}
        return {key: DTensor.from_local(one, mesh, [Shard(0)]) for key, one in shards.items()}

    def save(step: int, planner: Any = None, **more: Any) -> None:
        state = {**state_of(step), **more}
        dcp.save(state, storage_writer=writer_of(path, who), planner=planner)

    save(1)
    with pytest.raises(CheckpointException, match="the disk is gone"):
        save(2, Failing())
    if who == "ours":
        odd = DTensor.from_local(torch.zeros(3), mesh, [Partial() if rank else Shard(0)])
        with pytest.raises(CheckpointException, match="a sum that no rank has"):
            save(2, FastSavePlanner(), sum=odd)
        with pytest.raises(CheckpointException, match="cannot be pickled"):
            save(2, FastSavePlanner(), broken=None if rank else Broken())
    found = state_of(0)
    reader = FastStorageReader(path) if who == "ours" else dcp.FileSystemReader(path)
    try:
        dcp.load(found, storage_reader=reader)
        print(*sorted({int(x) for key in "abc" for x in found[key].to_local().unique()}))
    except CheckpointException:
        print("unreadable")
    save(3)
    dcp.load(found, storage_reader=reader)
    assert all(bool(torch.all(found[key].to_local() == 3)) for key in "abc")


# -- ShardedTensors from any sharding into any other -----------------------------------------------


def cut(dim: int, *cuts: tuple[int, int, int]) -> EnumerableShardingSpec:
    """Return a sharding of (10, 20) by rows or columns: first, number, rank."""
    shards = []
    for first, number, rank in cuts:
        offsets, sizes = [0, 0], [10, 20]
        offsets[dim], sizes[dim] = first, number
        shards.append(ShardMetadata(offsets, sizes, f"rank:{rank}"))
    return EnumerableShardingSpec(shards=shards)


SPECS: list[Any] = [
    ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1", "rank:1", "rank:0"]),
    cut(0, (0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)),
    cut(1, (0, 5, 1), (5, 14, 0), (19, 1, 1)),
]


def whole(tensor: Any) -> torch.Tensor:
    found = torch.zeros(10, 20)
    tensor.gather(out=found if dist.get_rank() == 0 else None)
    return found


def sharded_tensors(folder: str) -> None:
    plain = torch.arange(200.0).view(10, 20)
    for number, before in enumerate(SPECS):
        saved = sharded_tensor.rand(before, 10, 20)
        path = Path(folder) / str(number)
        planner = FastSavePlanner() if number % 2 else None
        state = {"x": saved, "plain": plain}
        dcp.save(state, storage_writer=FastStorageWriter(path), planner=planner)
        for other, after in enumerate(SPECS):
            stock = number == other
            reader: Any = dcp.FileSystemReader(path) if stock else FastStorageReader(path)
            found = {"x": sharded_tensor.zeros(after, 10, 20)}
            dcp.load(found, storage_reader=reader, planner=FastLoadPlanner())
            swapped = {"x": torch.zeros(10, 20), "plain": sharded_tensor.zeros(after, 10, 20)}
            dcp.load(swapped, storage_reader=reader)
            a, b, c = whole(saved), whole(found["x"]), whole(swapped["plain"])
            if dist.get_rank() == 0:
                assert torch.equal(a, b), (before, after)
                assert torch.equal(swapped["x"], a), (before, after)
                assert torch.equal(c, plain), (before, after)


# -- `distributed.load` of a folder ----------------------------------------------------------------


def load(folder: str) -> None:
    """Also into parts of tensors of another dtype; what the ranks do not do alike is an error."""
    rank, path, mesh = dist.get_rank(), Path(folder), mesh_of_all()
    full = torch.arange(7 * 600.0).view(7, 600)
    columns = distribute_tensor(full.bfloat16(), mesh, [Shard(1)])
    state = {"step": 7, "rng": (torch.arange(4), 3), "columns": columns}
    dcp.save(state, storage_writer=FastStorageWriter(path), planner=FastSavePlanner())

    part = torch.zeros(2000)
    rng = distribute_tensor(torch.zeros(4, dtype=torch.int64), mesh, [Shard(0)])
    into: dict[str, Any] = {"step": 0, "rng": (rng, 0)}
    into["columns"] = FlatShard((7, 600), torch.float32, 2000 * rank, 2000, part)
    with fastserial.options(verify_on_load=True):
        report = distributed.load(path, into, strict=True, cast=True)
    assert torch.equal(part, full.bfloat16().float().flatten()[2000 * rank : 2000 * rank + 2000])
    assert torch.equal(rng.full_tensor(), torch.arange(4))
    assert (into["step"], into["rng"][1]) == (7, 3)
    assert (report.container, report.verified) == ("dcp", True)
    assert [line.rank for line in report.ranks] == [0, 1]

    # Of what both want each reads a part; of what one wants, only that.
    whole = torch.zeros(7, 600)
    for broadcast, least, most in ((True, 1, 1.1), (False, 2, 2.2)):
        whole.zero_()
        report = distributed.load(
            path, {"columns": whole}, strict=False, cast=True, broadcast=broadcast
        )
        assert torch.equal(whole, full.bfloat16().float())
        assert least <= report.bytes / (full.nbytes // 2) <= most, report
        assert any(line.sent_bytes for line in report.ranks) == broadcast
    mine = distribute_tensor(torch.zeros(7, 600, dtype=torch.bfloat16), mesh, [Shard(1)])
    report = distributed.load(path, {"columns": mine}, strict=False)
    assert torch.equal(mine.full_tensor(), full.bfloat16())
    assert not any(line.sent_bytes for line in report.ranks), report

    for verify, strict in ((rank == 0, True), (False, rank == 0), (False, rank == 1)):
        text = "strict and verify_on_load are not the same on all ranks"
        with (
            fastserial.options(verify_on_load=verify),
            pytest.raises(LoadMismatchError, match=text),
        ):
            distributed.load(path, {"step": 0}, strict=strict, timeout=60)
    if rank:  # rank 0 decides what the path is
        path /= "none"
    with pytest.raises(FileNotFoundError) as missing:
        distributed.load(path, {"step": 0}, timeout=60)
    assert isinstance(missing.value, fastserial.DistributedError)
    assert missing.value.rank == 1
    path = Path(folder)
    dist.barrier()
    if rank == 0:
        with (path / "__1_0.distcp").open("r+b") as file:
            file.seek(file.seek(0, 2) // 2)
            file.write(b"damaged!" * 20)
    dist.barrier()
    with (
        fastserial.options(verify_on_load=True),
        pytest.raises(CorruptCheckpointError, match="record "),
    ):
        distributed.load(path, into, cast=True)


if __name__ == "__main__":  # a spawned process imports this
    ranks.main(globals())
