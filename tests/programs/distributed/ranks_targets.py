"""A rank of two: saves to unusual targets, as stock beside it. Arguments: folder, cases."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    if dist.get_rank() == 0:
        step()
    dist.barrier()


def attributes(path: Path) -> dict[str, Any]:
    """Return what a file has besides its bytes."""
    found = os.lstat(path)
    names = sorted(os.listxattr(path))
    return {
        "mode": stat.filemode(found.st_mode),
        "owner": (found.st_uid, found.st_gid),
        "extended": {name: os.getxattr(path, name) for name in names},
    }


def as_stock(folder: Path, prepare: Callable[[Path], object], umask: int = 0o22) -> None:
    """Save over a file that was prepared, beside stock, and compare all of the two files."""
    ours, theirs = folder / "ours" / "file.pt", folder / "theirs" / "file.pt"

    def prepared() -> None:
        for path in (ours, theirs):
            path.parent.mkdir()
            prepare(path)

    alone(prepared)
    os.umask(umask)
    distributed.save(state(), ours, timeout=30)

    def compared() -> None:
        torch.save(FULL, theirs)
        assert ours.read_bytes() == theirs.read_bytes()
        assert attributes(ours) == attributes(theirs), (attributes(ours), attributes(theirs))
        assert sorted(os.listdir(ours.parent)) == sorted(os.listdir(theirs.parent))

    alone(compared)


def new(folder: Path) -> None:
    as_stock(folder, lambda path: None, umask=0o137)


def private(folder: Path) -> None:
    def prepare(path: Path) -> None:
        path.write_bytes(b"old")
        path.chmod(0o600)
        os.setxattr(path, "user.note", b"keep me")

    as_stock(folder, prepare, umask=0)


def link(folder: Path) -> None:
    def prepare(path: Path) -> None:
        real = path.parent / "below" / "real.bin"
        real.parent.mkdir()
        real.write_bytes(b"old" * 1000)
        path.symlink_to("below/real.bin")

    as_stock(folder, prepare)
    report = last_save_report()
    assert dist.get_rank() or (report is not None and report.fallback is None)


def refused_by_all(path: Path, reason: str) -> None:
    """A save that all ranks refuse alike, with the path, the reason and what to do."""
    try:
        distributed.save(state(), path, timeout=30)
    except DistributedError as error:
        assert error.rank == 0
        for text in (str(path), reason, "Save to another path"):
            assert text in str(error), error
    else:
        raise AssertionError(f"{path} was written")
    dist.barrier()


def held(folder: Path) -> None:
    """Rank 0 has the file open: a new file would not be what its descriptor shows."""
    path = folder / "file.pt"
    alone(lambda: path.write_bytes(b"old"))
    with path.open("r+b") if dist.get_rank() == 0 else contextlib.nullcontext():
        refused_by_all(path, "this process has the file open")
        assert path.read_bytes() == b"old"
        assert os.listdir(folder) == ["file.pt"]
        dist.barrier()
    distributed.save(state(), path, timeout=30)
    dist.barrier()
    assert same_bytes(torch.load(path)["rows"], FULL["rows"])


def not_durable(folder: Path) -> None:
    path = folder / "file.pt"
    with options(durable=False):
        for _ in range(2):
            distributed.save(state(), path, timeout=30)
            report = last_save_report()
            assert report is not None
            assert not report.durable
            dist.barrier()
    (folder / "stock").mkdir(exist_ok=True)
    alone(lambda: torch.save(FULL, folder / "stock" / "file.pt"))
    assert path.read_bytes() == (folder / "stock" / "file.pt").read_bytes()


CASES = (new, private, link, held, not_durable)


def main() -> None:
    join()
    cases = {case.__name__: case for case in CASES}
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        alone(folder.mkdir)
        cases[name](folder)
        os.umask(0o22)
        dist.barrier()
        print(name)


main()
