"""A rank of two: saves to unusual targets, as stock beside it. Argument: folder."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import join
from support.sharded import noise, same_bytes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastserial import distributed, last_save_report, options
from fastserial.errors import DistributedError

FULL = {"step": 3, "rows": noise([1000, 700], torch.float32, 1)}


def state() -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return {"step": 3, "rows": distribute_tensor(FULL["rows"], mesh, [Shard(0)])}


def alone(step: Callable[[], object]) -> None:
    """Let rank 0 do something before the others go on."""
    dist.barrier()
    if dist.get_rank() == 0:
        step()
    dist.barrier()


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

    alone(prepared)
    os.umask(umask)
    for durable in (True, False):
        with options(durable=durable):
            distributed.save(state(), ours, timeout=30)
        report = last_save_report()
        assert dist.get_rank() or (report is not None and report.fallback is None)
        assert report is None or report.durable is durable
        dist.barrier()
    alone(lambda: torch.save(FULL, theirs))
    assert seen(ours) == seen(theirs)
    os.umask(0o22)


def held(path: Path) -> None:
    """Rank 0 has the file open: a new file would not be what its descriptor shows."""
    alone(lambda: path.write_bytes(b"old"))
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


def main() -> None:
    join()
    folder = Path(sys.argv[1])
    for prepare, umask in ((new, 0o137), (private, 0), (link, 0o22)):
        as_stock(folder / prepare.__name__, prepare, umask)
    alone((folder / "held").mkdir)
    held(folder / "held" / "file.pt")


main()
