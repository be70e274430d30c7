"""A rank: what `distributed.load` does with one file after another. Argument: a folder."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import own_loading
from support.damage import flip
from support.identity import digest
from support.ranks import alone, each, join
from support.sharded import parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros

import fastserial
from fastserial.distributed import FlatShard, load, save
from fastserial.errors import CorruptCheckpointError, DistributedError, LoadMismatchError
from fastserial.loading.reader import FastFileReader

FOLDER = Path(sys.argv[1])
RANK, COUNT = join()
MESH = DeviceMesh("cpu", torch.arange(COUNT))
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


def written(name: str, value: Any, **more: Any) -> Path:
    path = FOLDER / f"{name}.pt"
    alone(lambda: torch.save(value, path, **more))
    return path


def mismatch(path: Path, into: Any, *texts: str, **options: Any) -> None:
    """Make sure that nothing is loaded, and that one error says all of this."""
    with pytest.raises(LoadMismatchError) as caught:
        load(path, into, **options)
    assert all(text in str(caught.value) for text in (str(path), *texts)), caught.value


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)


def sharded(*shape: int, dtype: torch.dtype = torch.float32, placement: Any = Shard(0)) -> DTensor:  # noqa: B008
    return zeros(*shape, dtype=dtype, device_mesh=MESH, placements=[placement])


def full(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


@case
def values_and_containers_without_tensors_are_replaced() -> None:
    """Of another length or with other keys here, they are what the file has."""
    saved: dict[str, Any] = {
        "w": rows(4),
        "losses": [3.0, 2.0, 1.0],
        "meta": {"epoch": 3, "best": {"loss": 1.0}},
        "size": torch.Size([2, 3]),
        "pair": Pair(1, "b"),
        "tensors": Pair(rows(3), 2),
        "in": ([1, 2], {"a": 1}, (1, 2, 3)),
    }
    path = written("containers", saved)
    into: dict[str, Any] = {
        "w": torch.zeros(4),
        "losses": [],
        "meta": {"epoch": 0, "name": "x"},
        "size": torch.Size([2, 3]),
        "pair": Pair(0, ""),
        "tensors": Pair(torch.zeros(3), 0),
        "in": ([], {}, ()),
    }
    losses, meta, weight, tensor = into["losses"], into["meta"], into["w"], into["tensors"].first
    with torch.serialization.safe_globals([Pair]):
        load(path, into)
    assert {**into, "w": 0, "tensors": 0} == {**saved, "w": 0, "tensors": 0}
    assert [type(value) for value in into.values()] == [type(value) for value in saved.values()]
    assert into["losses"] is losses
    assert into["meta"] is meta
    assert into["w"] is weight
    assert into["tensors"].first is tensor
    assert into["tensors"].second == 2
    assert torch.equal(weight, rows(4))
    assert torch.equal(tensor, rows(3))
    path = written("kinds", {"a": {"x": 1}, "b": [rows(2)]})
    mismatch(path, {"a": [], "b": [torch.zeros(2)]}, "a: it is a list here, in the file a dict")
    mismatch(path, {"a": {}, "b": []}, "only in the file: b.0")


@case
def keys_that_differ_are_one_error_and_change_nothing() -> None:
    path = written("keys", {"a": rows(4), "b": {"c": rows(4), "d": 1}})
    into: dict[str, Any] = {"a": torch.zeros(4), "b": {"c": torch.zeros(4)}, "step": 3}
    into[f"of rank {RANK}"] = torch.zeros(2)
    missing = "not in the file: step, of rank 0 (rank 0), of rank 1 (rank 1)"
    mismatch(path, into, "only in the file: b.d", missing)
    assert not into["a"].any()
    report = load(path, into, strict=False)
    assert report.missing_keys == ("step", f"of rank {RANK}")
    assert f"not in the file, unchanged: step, of rank {RANK}" in str(report)
    assert report.unexpected_keys == ("b.d",)
    assert torch.equal(into["b"]["c"], rows(4))
    assert into["step"] == 3
    path = written("stages", {f"stage{rank}": rows(4) + rank for rank in range(COUNT)})
    mine = torch.zeros(4)
    load(path, {f"stage{RANK}": mine})
    assert torch.equal(mine, rows(4) + RANK)


@case
def shapes_dtypes_and_placements_are_compared_first() -> None:
    saved = {"a": rows(4), "b": rows(4), "c": rows(3), "d": 4, "e": rows(2), "f": rows(2)}
    path = written("shapes", {**saved, "g": torch.eye(3).to_sparse(), "h": rows(6)})
    into = {
        "a": torch.zeros(4),
        "b": sharded(5),
        "c": torch.zeros(3, dtype=torch.float64),
        "d": torch.zeros(()),
        "e": DTensor.from_local(torch.zeros(2), MESH, [Partial()], run_check=False),
        "f": torch.zeros(2, device="meta"),
        "g": torch.zeros(3, 3),
        "h": torch.zeros(1).expand(6),
    }
    mismatch(
        path,
        into,
        "b: its shape is (5,) here, in the file (4,)",
        "c: its dtype is torch.float64 here, in the file torch.float32",
        "d: it is a tensor here, in the file a int",
        "e: it is ",
        "it has no memory yet",
        "g: in the file its layout is",
        "several of its elements are one in memory",
    )
    assert not into["a"].any()


@case
def dtypes_are_converted_when_asked_to() -> None:
    saved = {"a": rows(40, 3), "b": rows(7, dtype=torch.int64), "c": rows(6), "d": rows(8, 8)}
    path = written("cast", saved)
    into: dict[str, Any] = {
        "a": sharded(40, 3, dtype=torch.bfloat16),
        "b": torch.zeros(7, dtype=torch.float64),
        "c": FlatShard((6,), torch.float16, RANK, 1, torch.zeros(1, dtype=torch.float16)),
        "d": sharded(8, 8, placement=Shard(1)),
    }
    into["d"]._local_tensor = into["d"].to_local().double()  # its shards are of another type
    mismatch(path, {"d": into["d"]}, "its dtype is torch.float64 here", strict=False)
    load(path, into, cast=True)
    assert torch.equal(full(into["a"]), rows(40, 3).bfloat16())
    assert torch.equal(into["b"], rows(7, dtype=torch.float64))
    assert into["c"].tensor.item() == RANK
    assert torch.equal(into["d"].to_local(), rows(8, 8).chunk(COUNT, 1)[RANK].double())
    path = written("cast-back", {"a": torch.ones(3, dtype=torch.complex64)})
    mismatch(path, {"a": torch.zeros(3)}, "cannot be converted", cast=True)


@case
def the_disk_is_read_once() -> None:
    state = {str(n): rows(600 + n, 512) for n in range(4)}
    path = written("disk", state)
    placements = [Shard(0), Shard(1), Replicate(), Shard(0)]
    into = {
        key: sharded(*value.shape, placement=placement)
        for (key, value), placement in zip(state.items(), placements, strict=True)
    }
    wanted = sum(value.nbytes for value in state.values())
    for direct in ("auto", True):
        with fastserial.options(direct=direct):
            report = load(path, into)
        edges = 2 * 4096 * COUNT * len(state)  # direct reads move whole pages
        assert wanted <= report.bytes <= path.stat().st_size + edges
        assert all(line.bytes > wanted / COUNT * 0.8 for line in report.ranks)
        assert "rank 0: io=" in str(report)
    assert all(torch.equal(full(into[key]), value) for key, value in state.items())


@case
def small_neighbours_are_read_once() -> None:
    state = {str(n): rows(4096) for n in range(400)}
    path = written("small", state)
    into = {key: torch.zeros(4096) for key in state}
    report = load(path, into)
    assert report.bytes <= path.stat().st_size + 2 * 4096 * COUNT
    assert torch.equal(into["399"], state["399"])


@case
def only_what_is_needed_is_read() -> None:
    path = written("part", {"a": rows(2**20), "b": rows(2**20), "c": rows(2**10, 2**10)})
    mine = torch.zeros(2**20)
    report = load(path, {"b": mine}, strict=False)
    assert torch.equal(mine, rows(2**20))
    assert mine.nbytes <= report.bytes < mine.nbytes + 2**16
    cut = FlatShard((2**10, 2**10), torch.float32, RANK * 1000, 1000, torch.zeros(1000))
    report = load(path, {"c": cut}, strict=False)
    assert torch.equal(cut.tensor, rows(2**20)[RANK * 1000 :][:1000])
    assert report.bytes < 2**16 * COUNT
    report = load(path, {"b": mine}, strict=False, broadcast=False)
    assert report.bytes >= COUNT * mine.nbytes
    assert not any(line.sent_bytes or line.received_bytes for line in report.ranks)


@case
def a_damaged_record_is_found_and_named() -> None:
    path = written("damaged", {"a": rows(90000), "b": rows(90000)})
    into = {"a": sharded(90000), "b": torch.zeros(90000)}
    with fastserial.options(verify_on_load=True):
        assert load(path, into).verified
        assert load(path, {"a": torch.zeros(90000), "b": None}, broadcast=False).verified
    at = path.read_bytes().index(rows(90000).numpy().tobytes()) + 200_000
    alone(lambda: flip(path, at))
    load(path, into)  # torch.load does not look, either
    for broadcast in (True, False):
        with (
            fastserial.options(verify_on_load=True),
            pytest.raises(CorruptCheckpointError) as caught,
        ):
            load(path, into, broadcast=broadcast)
        for text in (str(path), "record data/0 is damaged", "read by rank 0", "filled in part"):
            assert text in str(caught.value)


@case
def parts_of_one_storage_that_overlap_are_verified() -> None:
    """A rank may read bytes of a record twice, and others not at all."""
    whole = rows(100, 90)
    saved = {"a": whole, "b": whole[40:], "c": whole[:70], "d": whole[20:90]}
    path = written("overlapping", saved)
    for broadcast in (True, False):
        for names in ("abcd", "ab", "bc", "cd"):
            into = {name: torch.zeros_like(saved[name]) for name in names}
            into["a"] = sharded(100, 90)
            with fastserial.options(verify_on_load=True):
                load(path, into, strict=False, broadcast=broadcast)
            assert all(torch.equal(full(into[name]), saved[name]) for name in into)


@case
def files_that_differ_between_ranks() -> None:
    path = written("missing", {"a": rows(90)})
    other = path if RANK != 1 else FOLDER / "nowhere.pt"
    into = {"a": torch.zeros(90)}
    with pytest.raises(FileNotFoundError, match=r"rank 1: FileNotFoundError.*nowhere.pt") as caught:
        load(other, into)
    assert isinstance(caught.value, DistributedError)
    assert (caught.value.rank, caught.value.errno) == (1, errno.ENOENT)
    assert not into["a"].any()
    with pytest.raises(LoadMismatchError, match="not the same on all ranks"):
        load(path, into, broadcast=RANK == 0)
    mine = FOLDER / f"copy{RANK}.pt"
    mine.write_bytes(path.read_bytes())
    load(mine, into)  # each node may have a copy of its own
    assert torch.equal(into["a"], rows(90))
    if RANK == 1:
        flip(mine, mine.read_bytes().index(rows(90).numpy().tobytes()) + 100)
    dist.barrier()
    with pytest.raises(DistributedError, match=r"rank 1: .*not the file that rank 0 sees"):
        load(mine, into)


@case
def files_that_are_no_checkpoints() -> None:
    path, folder = FOLDER / "text.pt", FOLDER / "dcp"
    alone(lambda: path.write_text("no checkpoint, but long enough to be read as one " * 9))
    with pytest.raises(DistributedError, match=r"rank 0: .*neither a zip"):
        load(path, {"a": torch.zeros(2)})
    alone(folder.mkdir)
    alone((folder / ".metadata").touch)
    with pytest.raises(DistributedError, match=r"it is a folder, neither of .*/dcp'"):
        load(folder, {"a": torch.zeros(2)})
    path = written("code", {"a": os.system, "b": rows(2)})
    with pytest.raises(DistributedError, match="rank 0: ConvertError"):
        load(path, {"b": torch.zeros(2)}, strict=False)


@case
def a_read_that_fails_on_one_rank() -> None:
    path = written("fails", {"a": rows(600_000)})
    read_into = FastFileReader.read_into

    def failing(self: FastFileReader, extents: Any) -> None:
        if RANK == COUNT - 1:
            raise OSError(5, "Input/output error", self.name)
        read_into(self, extents)

    for target in (sharded(600_000), torch.zeros(600_000)):
        with (
            mock.patch.object(FastFileReader, "read_into", failing),
            pytest.raises(DistributedError, match=f"rank {COUNT - 1}: .*Input/output") as caught,
        ):
            load(path, {"a": target})
        assert "filled in part" in str(caught.value)
        assert caught.value.rank == COUNT - 1


@case
def nothing_one_tensor_and_tied_targets() -> None:
    load(written("empty", {}), {})
    lone = torch.zeros(6)
    path = written("one", rows(6))
    load(path, lone)
    assert torch.equal(lone, rows(6))
    with pytest.raises(TypeError, match="load fills tensors"):
        load(path, 3)
    weight, one = nn.Parameter(rows(30, 4)), torch.zeros(30, 4)
    path = written("tied", {"a": weight, "b": weight, "c": weight[3:7], "d": weight.t()})
    into: dict[str, Any] = {"a": one, "b": one, "c": sharded(4, 4), "d": sharded(4, 30)}
    load(path, into)
    assert torch.equal(one, weight)
    assert torch.equal(full(into["c"]), weight[3:7])
    assert torch.equal(full(into["d"]), weight.t())
    into = {"a": None, "b": None}
    load(path, into, strict=False)
    assert into["a"] is into["b"]
    assert type(into["a"]) is torch.Tensor
    assert torch.equal(into["a"], weight)


class Counting(nn.Module):
    """A module with a buffer and a state that is no tensor."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.one, self.two = nn.Linear(7, 5), nn.Linear(5, 3, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.notes = "new"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.two(self.one(x))

    def get_extra_state(self) -> str:
        return self.notes

    def set_extra_state(self, state: str) -> None:
        self.notes = state


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        model(torch.full((2, 7), step + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def modules_and_optimizers_of_one_process_as_stock_wrote_them() -> None:
    old = Counting(1)
    adam = torch.optim.AdamW(old.parameters(), lr=0.25)
    trained(old, adam)
    old.notes = "old"
    path = written("stock", {"m": old.state_dict(), "o": [adam.state_dict()], "epoch": 4})
    for kind in ("plain", "ddp", "fsdp"):
        new = Counting(2)
        outer = parallel(new, kind, new.one)
        fresh = torch.optim.AdamW(outer.parameters(), lr=0.5)
        step = {"m": outer, "o": [fresh], "epoch": 0}
        weight = new.one.weight
        load(path, step)
        assert new.one.weight is weight
        assert (step["epoch"], new.notes, new.seen.item()) == (4, "old", 3)
        assert fresh.state_dict()["param_groups"] == adam.state_dict()["param_groups"]
        for a, b in zip(old.parameters(), new.parameters(), strict=True):
            assert torch.equal(a, full(b))
            for key, value in adam.state[a].items():
                assert torch.equal(value, full(fresh.state[b][key])), key


@case
def an_optimizer_alone_or_another_one() -> None:
    model = Counting(1)
    adam = torch.optim.AdamW(model.parameters())
    trained(model, adam)
    path = written("other", {"m": model.state_dict(), "o": adam.state_dict()})
    with pytest.raises(ValueError, match="Put the module, or the parameter itself, beside"):
        load(path, {"o": adam}, strict=False)
    few = torch.optim.AdamW(model.one.parameters())
    mismatch(path, {"m": model, "o": few}, "o: the file numbers its parameters")
    path = written("no-state", {"m": model.state_dict(), "o": 3})
    mismatch(path, {"m": model, "o": adam}, "o: the file holds no optimizer's state")


@case
def a_mesh_whose_ranks_are_not_in_order() -> None:
    """The groups of torch put them in order."""
    mesh = DeviceMesh("cpu", torch.arange(COUNT).flip(0))
    path = FOLDER / "turned.pt"
    saved, into = (distribute_tensor(one, mesh, [Shard(0)]) for one in (rows(60), torch.zeros(60)))
    save({"x": saved}, path)
    assert torch.equal(torch.load(path)["x"], rows(60))
    load(path, {"x": into})
    assert torch.equal(into.full_tensor(), rows(60))


@case
def modules_that_load_by_themselves() -> None:
    """What one process does with a file and a module, ranks do: also of a file of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (make, change) in own_loading.CASES.items():
            torch.manual_seed(1)
            saved = make()
            state = change(saved.state_dict())
            # Without versions a file counts as the module's own, as in DCP.
            versioned = "version 1" not in name
            path = written("module", {"model": state, "n": 3})
            stock, ours = own_loading.spoilt(make()), own_loading.spoilt(make())
            stock.load_state_dict(torch.load(path)["model"])
            load(path, {"model": ours, "n": 0}, timeout=60)
            assert not versioned or digest(ours.state_dict()) == digest(stock.state_dict()), name
            if name in {"lazy", "half"}:  # before it has memory, or of another dtype
                continue
            own = FOLDER / "own.pt"
            save({"model": saved}, own, timeout=60)
            ours = own_loading.spoilt(make())
            load(own, {"model": ours}, timeout=60)
            assert digest(ours.state_dict()) == digest(saved.state_dict()), name
        target = nn.Sequential(own_loading.Versioned(2, 2), nn.BatchNorm1d(3))
        path = written("module", nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3)).state_dict())
        with pytest.raises(LoadMismatchError, match=r"Missing key\(s\).*1.running_mean"):
            load(path, target, timeout=60)


each(CASES)
