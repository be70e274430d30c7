"""Ranks whose tensors are on a fake device (`support.devices`), each on one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import ranks
from support.devices import FakeDevice, Fault, plugged_in
from support.identity import stock
from support.sharded import noise, same_bytes, split
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fastserial
from fastserial import distributed
from fastserial.distributed.comm import exchange
from fastserial.distributed.comm.exchange import Exchange
from fastserial.distributed.dcp import shard_layout
from fastserial.distributed.state import tables
from fastserial.errors import DistributedError
from fastserial.memory import buffers
from fastserial.memory.buffers import Buffer, Ring
from fastserial.overlap import snapshot
from fastserial.saving.extent_writer import RequestQueue

KIB = 1024
OPTIONS: dict[str, Any] = {
    "block_size": 64 * KIB, "queue_depth": 3, "threads": 2, "small_file": 0, "durable": False,
}  # fmt: skip
away: set[int] = set()  # addresses of the storages that are on the device


def is_on_host(storage: torch.UntypedStorage) -> bool:
    return storage.data_ptr() not in away


def on_host(view: Any) -> bool:
    return is_on_host(getattr(view, "_local_tensor", view).untyped_storage())


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Let the storages in `away` be on a device."""
    with pytest.MonkeyPatch.context() as patch:
        device = plugged_in(patch, FakeDevice())
        for module in (exchange, tables):
            patch.setattr(module, "on_host", on_host)
        for module in (snapshot, shard_layout):
            patch.setattr(module, "is_on_host", is_on_host)
        patch.setattr(buffers, "THROUGH_RING", 1)
        yield device


def whole_state() -> dict[str, torch.Tensor]:
    return {
        "rows": noise([301, 1000], torch.float32, 1),
        "columns": noise([500, 302], torch.bfloat16, 2),
        "bytes": noise([3, 70_001], torch.uint8, 3),
        "replicas": noise([100_000], torch.int64, 4),
        "flat": noise([300_001], torch.float32, 5),
        "complex": noise([64, 65], torch.complex128, 6),
    }


def held(whole: dict[str, torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the state as a rank has it, and the local tensors, which are on the device."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = {
        "rows": Shard(0), "columns": Shard(1), "bytes": Shard(1), "replicas": Replicate(),
        "complex": Shard(1),
    }  # fmt: skip
    state: dict[str, Any] = {
        key: split(whole[key], mesh, [placement]) for key, placement in placed.items()
    }
    locals_ = [one.to_local() for one in state.values()]
    flat, size, me = whole["flat"], dist.get_world_size(), dist.get_rank()
    first, stop = (one * len(flat) // size for one in (me, me + 1))
    part = flat[first:stop].clone()
    state["flat"] = distributed.FlatShard((len(flat),), flat.dtype, first, stop - first, part)
    state = {key: state[key] for key in whole}
    locals_.append(part)
    away.clear()
    away.update(local.untyped_storage().data_ptr() for local in locals_)
    return state, locals_


def save(state: Any, path: Path) -> Any:
    return distributed.save(state, path, timeout=30)


def save_async(state: Any, path: Path) -> Any:
    return distributed.save_async(state, path, timeout=30)


def saves_what_will_be(device: FakeDevice, path: Path, call: Any) -> bool:
    """Save what kernels are still to write when the save begins, and overwrite it later."""
    whole = whole_state()
    state, locals_ = held(whole)
    wanted = [local.clone() for local in locals_]
    for local, values in zip(locals_, wanted, strict=True):
        local.zero_()
        device.kernel(partial(local.copy_, values))
    saving = call(state, path)
    for local in locals_:
        device.kernel(local.zero_)
    device.finish()
    if call is save_async:
        saving.wait()
    dist.barrier()
    found = torch.load(path)
    ok = all(same_bytes(found[key], whole[key]) for key in whole) and device.faults == []
    dist.barrier()
    return ok


def identity(folder: str) -> None:
    """The file is stock's, whatever the order in which copies complete."""
    theirs = Path(folder, "stock", "x.pt")
    with stock():
        ranks.alone(lambda: (theirs.parent.mkdir(), torch.save(whole_state(), theirs)))
    path = Path(folder, "x.pt")
    with fake_device() as device, fastserial.options(**OPTIONS):
        for seed in range(6):
            call = (save, save_async)[seed % 2]
            device.renew(seed, haste=seed % 5 / 5)
            assert saves_what_will_be(device, path, call), (seed, device.faults)
            assert path.read_bytes() == theirs.read_bytes()
            assert device.copies >= 5
            dist.barrier()


def folder_of_dcp(folder: str) -> None:
    """DCP's writer copies from devices in the same way."""
    whole = whole_state()
    del whole["flat"]
    with fake_device() as device, fastserial.options(**OPTIONS):
        for seed in range(3):
            device.renew(seed, haste=seed / 5)
            state, _ = held({**whole, "flat": torch.zeros(4)})
            del state["flat"]
            path = Path(folder, f"dcp{seed}")
            dcp.save(
                state,
                storage_writer=distributed.FastStorageWriter(path),
                planner=distributed.FastSavePlanner(),
            )
            assert device.copies >= 3
            assert device.faults == []
            dist.barrier()
            assert fastserial.verify(path).ok
            found = {key: torch.zeros_like(one) for key, one in whole.items()}
            distributed.load(path, found, timeout=30)
            assert all(same_bytes(found[key], whole[key]) for key in whole)


def never_waits(ring: Ring, buffer: Buffer) -> None:
    ring._fences[buffer.index].clear()


def control(folder: str) -> None:
    """Nobody waits for the copies: some seed shows it, on some rank."""
    path, found = Path(folder, "x.pt"), False
    patching = pytest.MonkeyPatch.context()
    with fake_device() as device, fastserial.options(**OPTIONS), patching as patch:
        patch.setattr(Ring, "arrive", never_waits)
        for seed in range(10):
            device.renew(seed, haste=0.1)
            try:
                found = not saves_what_will_be(device, path, save)
            except (Fault, DistributedError):
                found = True
            each: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(each, found)
            if any(each):
                return
    pytest.fail("no seed shows the bug")


def overlap(folder: str) -> None:
    """Blocks are written while copies of what is sent are under way; not if each is waited for."""
    exchanges: list[Exchange] = []
    begin, submit = Exchange.begin, RequestQueue.submit
    counted = {"meanwhile": 0}

    def noted_begin(one: Exchange, *args: Any) -> Any:
        exchanges.append(one)
        return begin(one, *args)

    def noted_submit(queue: RequestQueue) -> None:
        for one in exchanges[-1:]:
            if queue._batch and one._pinned is not None:
                memory = buffers.host_buffer(one._pinned.address, one._pinned.nbytes).view
                pinned = torch.frombuffer(memory, dtype=torch.uint8)
                steps = [step for stream in device._streams for step in stream.steps]
                counted["meanwhile"] += any(step.is_at(pinned) for step in steps)
        submit(queue)

    path = Path(folder, "x.pt")
    with fake_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "begin", noted_begin)
        patch.setattr(RequestQueue, "submit", noted_submit)
        for transfer in ("auto", "cpu_gpu"):
            device.renew(0, haste=0)  # nothing completes before somebody waits for it
            counted["meanwhile"] = 0
            exchanges.clear()
            with fastserial.options(**OPTIONS, transfer=transfer):
                whole = whole_state()
                state, _ = held(whole)
                report = save(state, path)
            dist.barrier()
            found = torch.load(path)
            assert all(same_bytes(found[key], whole[key]) for key in whole)
            taken = "cpu_async_gpu" if transfer == "auto" else "cpu_gpu"
            assert report.transfer == taken, report
            assert (counted["meanwhile"] > 0) == (transfer == "auto"), (transfer, counted)
            assert (device.copies > 0) == (transfer == "auto")
            dist.barrier()


SCENES = (identity, folder_of_dcp, control, overlap)
ranks.main({scene.__name__: scene for scene in SCENES})
