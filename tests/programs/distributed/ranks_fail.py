"""A rank of three: saves that fail on some rank, each for another reason. Arguments: folder, cases.

Each time all ranks raise, the old file stays, nothing else is left, and the next save goes well.
"""

from __future__ import annotations

import ctypes
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from fastserial import distributed
from fastserial.distributed import FlatShard
from fastserial.distributed.onefile import saver
from fastserial.errors import DistributedError

MIB = 1024 * 1024
_CLONE_NEWNS = 0x20000


def good(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "step": 7,
        "rows": distribute_tensor(torch.arange(3 * MIB).view(3072, 1024), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(3 * MIB).view(1024, 3072), mesh, [Shard(1)]),
    }


def unpicklable(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    if rank == 0:
        state["hook"] = lambda: None


def key(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    if rank == 1:
        state["more"] = torch.zeros(3)


def shape(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    state["bias"] = torch.zeros(3 + rank // 2)


def partial(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    state["sum"] = DTensor.from_local(torch.zeros(3), mesh, [Partial()])


def placement(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    if rank == 2:
        local = torch.zeros(3072, 340, dtype=torch.int64)
        state["rows"] = DTensor.from_local(
            local,
            mesh,
            [Shard(1)],
            run_check=False,
            shape=torch.Size((3072, 1024)),
            stride=(1024, 1),
        )


def resized(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    if rank == 1:
        state["rows"].to_local().untyped_storage().resize_(100)


def flat_type(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    """What `module.half()` does to the memory of its parameters."""
    flat = FlatShard((3 * MIB,), torch.float32, rank * MIB, MIB, torch.zeros(MIB))
    state["flat"] = flat
    if rank == 2:
        flat.tensor.data = flat.tensor.data.half()


def gap(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    state["gap"] = FlatShard((4 * MIB,), torch.uint8, rank * MIB, 5, torch.zeros(5).byte())


def full(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * MIB, resource.RLIM_INFINITY))


def enough(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def interrupted(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def agree(self: Any, **more: object) -> None:
        signal.signal(signal.SIGALRM, stop)
        signal.raise_signal(signal.SIGALRM)

    if rank == 2:
        saver.Traffic.agree = agree  # type: ignore[method-assign]


def gone_on(rank: int) -> None:
    saver.Traffic.agree = AGREE  # type: ignore[method-assign]


def unseen(state: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    if rank == 2:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
        folder = sys.argv[1]
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)


AGREE = saver.Traffic.agree
CASES: dict[str, tuple[Callable[[dict[str, Any], int, DeviceMesh], None], int | None, str]] = {
    # name: what goes wrong, on which rank, and how the error says it
    "unpicklable": (unpicklable, 0, "ickl"),
    "key": (key, 1, "'more'"),
    "shape": (shape, 2, r"'bias' is torch.float32 of shape \(4,\)"),
    "partial": (partial, None, "sum: it is .*a sum that no rank has"),
    "placement": (placement, 2, "its 'rows' is placed otherwise"),
    "resized": (resized, 1, "rows: its shard needs [0-9]+ bytes, .* resized to 100"),
    "flat_type": (flat_type, 2, "flat: the tensor is torch.float16, the FlatShard torch.float32"),
    "gap": (gap, None, "gap: no rank has elements 5 to 1048575 of it"),
    "full": (full, 1, "File too large"),
    "interrupted": (interrupted, 2, "KeyboardInterrupt"),
    "unseen": (unseen, 2, "one file system"),
}
AFTER = {"full": enough, "interrupted": gone_on}


def failure(state: dict[str, Any], path: Path, timeout: float) -> BaseException | None:
    try:
        distributed.save(state, path, timeout=timeout)
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


def fails(name: str, path: Path, rank: int, mesh: DeviceMesh) -> None:
    break_it, culprit, text = CASES[name]
    state = good(rank, mesh)
    break_it(state, rank, mesh)
    began = time.monotonic()
    error = failure(state, path, 30)
    if name == "interrupted" and rank == 2:
        assert isinstance(error, KeyboardInterrupt)
    elif name == "unpicklable" and rank == 0:  # an error of other code is raised as it is
        assert isinstance(error, PicklingError | AttributeError), error
    else:
        assert isinstance(error, DistributedError), (name, error)
        assert culprit in (None, error.rank), (name, error)
        assert re.search(text, str(error)), (name, str(error))
    assert time.monotonic() - began < 60, f"{name} took its time"
    AFTER.get(name, lambda rank: None)(rank)


def silent(path: Path, rank: int, mesh: DeviceMesh) -> None:
    """A rank that comes too late: the others raise after the timeout, and name it."""
    state = good(rank, mesh)
    if rank == 1:
        time.sleep(4)
    began = time.monotonic()
    error = failure(state, path, 1)
    assert isinstance(error, DistributedError), error
    assert error.rank == 1, error
    assert "not heard from" in str(error), error
    assert time.monotonic() - began < 3.9


def main() -> None:
    rank, count = join()
    mesh = DeviceMesh("cpu", torch.arange(count))
    folder = Path(sys.argv[1])
    path = folder / "file.pt"
    for name in sys.argv[2:]:
        distributed.save(good(rank, mesh), path, timeout=30)
        dist.barrier()
        before = path.read_bytes()
        dist.barrier()
        if name == "silent":
            silent(path, rank, mesh)
        else:
            fails(name, path, rank, mesh)
        dist.barrier()
        if name == "unseen" and rank == 2:
            subprocess.run(["umount", folder], check=True)
        assert path.read_bytes() == before, name
        left = [found.name for found in folder.iterdir() if found.name != "file.pt"]
        assert not left, (name, left)
        print(name)
    distributed.save(good(rank, mesh), path, timeout=30)


main()
