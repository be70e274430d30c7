"""A rank of three: saves and loads what is unusual, and compares with stock. Arguments: folder."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from support.sharded import noise
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fastserial import distributed
from fastserial.distributed import FastSavePlanner, FastStorageWriter
from fastserial.errors import DistributedError, LoadMismatchError


def same(folder: Path, state: Any, whole: Any, **options: Any) -> None:
    """Save, and compare with stock. Collective."""
    path, stock = folder / "file.pt", folder / "stock" / "file.pt"
    distributed.save(state, path, timeout=30, **options)
    if dist.get_rank() == 0:
        stock.parent.mkdir(exist_ok=True)
        torch.save(whole, stock)
        assert path.read_bytes() == stock.read_bytes()
    dist.barrier()


def within_an_object(folder: Path, rank: int, count: int) -> None:
    """A large tensor in an object that only rank 0 looks into, which other ranks write."""
    large = noise([3 * 2**20], torch.uint8, 1)
    state = {"n": SimpleNamespace(x=large), "rest": noise([2**21], torch.uint8, 2)}
    same(folder, state, state)


def stages_change(folder: Path, rank: int, count: int) -> None:
    """A tensor moves to another pipeline stage: the plan of the last save does not count."""
    pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    for size in (30, 400_000):
        whole = {f"p{index}": torch.full((size,), float(index)) for index in range(4)}
        for cuts in ((0, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4)):
            names = list(whole)[cuts[rank] : cuts[rank + 1]]
            same(folder, {name: whole[name] for name in names}, whole, merge="union")
        for which in ((0, 0, 1), (0, 1, 1)):
            state = {}
            for index, number in enumerate(which):
                members = pairs[number].mesh.tolist()
                if rank in members:
                    local = whole[f"p{index}"].chunk(2)[members.index(rank)].clone()
                    state[f"p{index}"] = DTensor.from_local(local, pairs[number], [Shard(0)])
            three = {f"p{index}": whole[f"p{index}"] for index in range(3)}
            same(folder, state, three, merge="union")


def turned_mesh(folder: Path, rank: int, count: int) -> None:
    """A mesh whose ranks are not in order: torch's groups put them in order."""
    full = noise([300, 500], torch.float32, 5)
    for ranks in (torch.arange(count).flip(0), torch.tensor([[1, 0, 2]])):
        mesh = DeviceMesh("cpu", ranks)
        state = {"x": distribute_tensor(full, mesh, [Shard(0)] * ranks.dim())}
        whole = {"x": state["x"].full_tensor()}
        assert torch.equal(whole["x"].view(torch.int32), full.view(torch.int32))
        same(folder, state, whole)
        target = {"x": distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)] * ranks.dim())}
        distributed.load(folder / "file.pt", into=target, timeout=30)
        assert torch.equal(target["x"].full_tensor().view(torch.int32), full.view(torch.int32))


def modes(folder: Path, rank: int, count: int) -> None:
    """What a program may have set for torch's functions says nothing of ours."""
    full = noise([300, 1000], torch.float32, 3)
    mesh = DeviceMesh("cpu", torch.arange(count))
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    with torch.inference_mode():
        leaf = distribute_tensor(full, mesh, [Shard(1)])
        same(folder, {"x": leaf, "y": full}, {"x": full.clone(), "y": full})
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        local = torch.zeros_like(full.chunk(count)[rank], requires_grad=True)
        rows = DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False)
        with mode():
            distributed.load(folder / "file.pt", {"x": rows}, strict=False)
        mine = full.chunk(count)[rank]
        assert torch.equal(rows.to_local().view(torch.int32), mine.view(torch.int32))


def type_of_shards(folder: Path, rank: int, count: int) -> None:
    """Shards of another type than the DTensor tells: what is loaded is converted if asked for."""
    full = torch.arange(30_000.0).view(300, 100)
    mesh = DeviceMesh("cpu", torch.arange(count))
    same(folder, {"x": distribute_tensor(full, mesh, [Shard(0)])}, {"x": full})
    target = distribute_tensor(torch.zeros_like(full), mesh, [Shard(1)])
    target._local_tensor = target.to_local().double()
    try:
        distributed.load(folder / "file.pt", {"x": target}, timeout=30)
    except LoadMismatchError as error:
        assert "its dtype is torch.float64 here" in str(error), error
    else:
        raise AssertionError("no error")
    distributed.load(folder / "file.pt", {"x": target}, timeout=30, cast=True)
    mine = full.chunk(count, dim=1)[rank]
    assert torch.equal(target.to_local(), mine.double())


class Ragged(Placement):
    """Rows of uneven numbers, which only the DTensor's own class knows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ragged)

    def __hash__(self) -> int:
        return hash(Ragged)


class RaggedTensor(DTensor):
    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        rows = self._local_tensor.shape[0]
        before = torch.Size([sum(range(3, 3 + dist.get_rank()))])
        chunk = ChunkStorageMetadata(before, torch.Size([rows]))
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        data = TensorWriteData(chunk, properties, self.shape)
        return [WriteItem(MetadataIndex(fqn, before), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._local_tensor


def unknown_placement(folder: Path, rank: int, count: int) -> None:
    """DCP's own plan saves it; one file cannot hold it."""
    mesh = DeviceMesh("cpu", torch.arange(count))
    first = sum(range(3, 3 + rank))
    local = torch.arange(float(first), float(first + 3 + rank))
    meta = TensorMeta(torch.Size([12]), (1,), torch.float32)
    spec = DTensorSpec(mesh, (Ragged(),), tensor_meta=meta)
    new: Any = DTensor.__new__
    for number in range(2):
        state = {"x": new(RaggedTensor, local, spec, requires_grad=False), "n": number}
        writer = FastStorageWriter(folder / str(number))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.save(state, storage_writer=writer, planner=FastSavePlanner())
        assert len([one for one in caught if "x: its placement Ragged" in str(one.message)]) == 1
        found = {"x": torch.zeros(12)}
        dcp.load(found, checkpoint_id=folder / str(number))
        assert torch.equal(found["x"], torch.arange(12.0))
    try:
        distributed.save(state, folder / "file.pt", timeout=30)
    except DistributedError as error:
        assert "x: its placement Ragged" in str(error), error
        assert "FlatShard" in str(error), error
    else:
        raise AssertionError("no error")


CASES = (
    *(within_an_object, stages_change, turned_mesh, modes),
    *(type_of_shards, unknown_placement),
)


def main() -> None:
    rank, count = join()
    folder, name = Path(sys.argv[1]), sys.argv[2]
    {case.__name__: case for case in CASES}[name](folder, rank, count)


main()
