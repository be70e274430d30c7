"""What is tried against every power cut: saves of each kind, and controls that lose something.

A workload prepares a folder, does one thing in it, and can say of what a cut has left: is that what
was there before (`old`), what is there afterwards (`new`), or something else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import make
from support import processes
from support.weak_disk import Attributes, State
from support.weak_disk import make as make_state
from torch.distributed.checkpoint.api import CheckpointException

import fastserial
from fastserial import distributed
from fastserial.errors import FastserialError
from fastserial.files import destination

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # for scratch
_NBYTES = 150_000
OPTIONS = {
    "small_file": 0,
    "block_size": 65536,
    "cache": "drop",
}  # several blocks, without the cache
_TEMPORARY = ".fastserial-"
Files = dict[str, tuple[Attributes, bytes]]


def files_of(folder: Path) -> Files:
    """Return the files in a folder by their paths, links followed."""
    found: Files = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where, name)
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                attributes = Attributes(status.st_mode, status.st_uid, status.st_gid)
                found[str(path.relative_to(folder))] = attributes, path.read_bytes()
    return found


def a_file(folder: Path, before: Files, after: Files, name: str = "x.pt") -> str:
    """Say which file is at the path, with owner, group and mode."""
    found = files_of(folder).get(name)
    for what, files in (("old", before), ("new", after)):
        if found == files.get(name):
            return what
    if found is None:
        return "no file"
    for what, files in (("old", before), ("new", after)):
        if name in files and found[1] == files[name][1]:
            return f"{what} bytes, of another owner or mode"
    return "torn"


def a_checked_file(folder: Path, before: Files, after: Files) -> str:
    """The same, but `verify` tells a file that is torn from others; the owner may be lost, too."""
    found = a_file(folder, before, after)
    if found.startswith("new bytes"):
        return "new, of another owner"
    if found == "torn":
        try:
            return "wrong, unseen" if fastserial.verify(folder / "x.pt").ok else "damaged"
        except (FastserialError, OSError):
            return "damaged"
    return found


@dataclass(frozen=True)
class Workload:
    """See the text at the top.

    Attributes:
        prepare: what was there long before: all of it is on the disk.
        act: the thing that is done; on every rank.
        judge: says what a folder holds, given what was there before and afterwards.
        ranks: their number.
        may: what may be found until `act` returns.
        then: what may be found from then on.
        loses: it is a control: something else is found.
        matters: see `weak_disk.states_of`.
        needs: modules.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    judge: Callable[[Path, Files, Files], str] = a_file
    ranks: int = 1
    may: frozenset[str] = frozenset({"old", "new"})
    then: frozenset[str] = frozenset({"new"})
    loses: bool = False
    matters: Callable[[str], bool] = lambda path: os.path.basename(path) == "x.pt"
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def can_run(self) -> bool:
        return all(importlib.util.find_spec(name) is not None for name in self.needs)


def skip_without(workload: Workload) -> None:
    """Skip the test if something is missing."""
    if not workload.can_run:
        pytest.skip(f"needs {', '.join(workload.needs)}")


def looked_at(workload: Workload, before: Files, after: Files, state: State, scratch: Path) -> str:
    """Make a state in a new folder, and say what it holds."""
    folder = scratch / "state"
    folder.mkdir()
    try:
        make_state(state, folder)
        return workload.judge(folder, before, after)
    finally:
        shutil.rmtree(folder)


def state(number: int) -> dict[str, Any]:
    return make(number, _NBYTES)


def save(path: Path, number: int, legacy: bool = False) -> None:
    torch.save(state(number), path, _use_new_zipfile_serialization=not legacy)


def an_old_file(folder: Path) -> None:
    """Make one of another user, that not everybody may read."""
    save(folder / "x.pt", 1)
    if os.geteuid() == 0:
        os.chown(folder / "x.pt", 1234, 4321)
    (folder / "x.pt").chmod(0o640)


def nothing(folder: Path) -> None:
    pass


def overwrite(folder: Path) -> None:
    save(folder / "x.pt", 2)


# -- one process ----------------------------------------------------------------------------------


def a_linked_file(folder: Path) -> None:
    (folder / "real").mkdir()
    an_old_file(folder / "real")
    (folder / "link.pt").symlink_to("real/x.pt")


def an_old_legacy_file(folder: Path) -> None:
    save(folder / "x.pt", 1, legacy=True)
    (folder / "x.pt").chmod(0o640)


def with_a_name(folder: Path) -> None:
    """As where a file cannot be without a name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(destination, "_can_link", lambda: False)
        overwrite(folder)


def in_the_background(folder: Path) -> None:
    fastserial.save_async(state(2), folder / "x.pt").wait()


def into_a_writer(folder: Path) -> None:
    with fastserial.FastFileWriter(folder / "x.pt") as file:
        torch.save(state(2), cast(Any, file))


def _frozen(number: int) -> dict[str, Any]:
    return {"frozen": torch.arange(100_000), **state(number)}


def an_old_base(folder: Path) -> None:
    fastserial.save(_frozen(1), folder / "x.pt")


def with_a_base(folder: Path) -> None:
    fastserial.save(_frozen(2), folder / "x.pt", base=folder / "x.pt")


# -- a folder of checkpoints ----------------------------------------------------------------------


def _checkpointer(folder: Path, weight: torch.Tensor) -> fastserial.Checkpointer:
    return fastserial.Checkpointer(folder / "run", {"weight": weight}, keep=1)


def _save_steps(folder: Path, *steps: int) -> None:
    weight = torch.zeros(30_000)
    with _checkpointer(folder, weight) as checkpointer:
        for step in steps:
            weight.fill_(step)
            checkpointer.save(step)
            checkpointer.wait()


def two_steps(folder: Path) -> None:
    _save_steps(folder, 1, 2)


def third_step(folder: Path) -> None:
    _save_steps(folder, 3)


def with_a_mirror(folder: Path) -> None:
    remote = (folder.parent / f"{folder.name}-remote").as_uri()
    weight = {"weight": torch.ones(10)}
    with fastserial.Checkpointer(folder / "run", weight, keep=1, mirror=remote) as checkpointer:
        checkpointer.save(3)


def the_run_of_a_mirror(folder: Path, before: Files, after: Files) -> str:
    """Say whether the identity of the run is there; a part of it would be another run's."""
    return a_file(folder, before, after, "run/.fastserial.run")


def resumed(folder: Path, before: Files, after: Files) -> str:
    """Say from which step a run would go on."""
    weight = torch.full((30_000,), -1.0)
    if not (folder / "run").is_dir():
        return "old" if not before else "no folder"
    with _checkpointer(folder, weight) as checkpointer:
        step = checkpointer.resume()
    if step == 3 and bool((weight == 3).all()):
        return "new"
    if step == (2 if before else 0) and bool((weight == (step or -1)).all()):
        return "old"
    return f"step {step}"


# -- two ranks ------------------------------------------------------------------------------------


def _sharded(number: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.full((50, 100), float(number))
    return {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "all": torch.full((300,), float(number)),
        "step": number,
    }


def _whole(found: dict[str, Any]) -> str:
    number = int(found["step"])
    same = all(bool((found[key] == number).all()) for key in ("rows", "all"))
    return {1: "old", 2: "new"}[number] if same else "a mixture"


def ranks_save_one(number: int) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        distributed.save(_sharded(number), folder / "x.pt")

    return act


def ranks_save_dcp(number: int, writer: Any = None) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        to = (writer or distributed.FastStorageWriter)(folder / "run")
        dcp.save(_sharded(number), storage_writer=to)

    return act


def a_dcp_folder(folder: Path, before: Files, after: Files) -> str:
    if not (folder / "run" / ".metadata").exists():
        return "no checkpoint" if before else "old"
    found = {"rows": torch.zeros(100, 100), "all": torch.zeros(300), "step": 0}
    try:
        dcp.load(found, storage_reader=dcp.FileSystemReader(folder / "run"), no_dist=True)
        return _whole(found)
    except (Exception, CheckpointException):
        return "cannot be loaded"


def ranks_save_safetensors(folder: Path) -> None:
    model = {key: value for key, value in _sharded(2).items() if key != "step"}
    distributed.save(model, folder / "run", format="safetensors", shard_nbytes=30_000)


def a_safetensors_folder(folder: Path, before: Files, after: Files) -> str:
    """Say what is there: the index is what completes it."""
    if not (folder / "run" / "model.safetensors.index.json").exists():
        return "old"
    found = files_of(folder)
    names = [name for name in after if _TEMPORARY not in name]
    return "new" if all(found.get(name) == after[name] for name in names) else "not complete"


# -- controls -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _syncs(by: Callable[[Callable[[int], None], int], None]) -> Iterator[None]:
    """Let something else sync."""
    real = os.fsync
    os.fsync = lambda fd: by(real, fd if isinstance(fd, int) else fd.fileno())  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = real


def _is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def _no_sync_of_the_file(sync: Callable[[int], None], fd: int) -> None:
    if _is_directory(fd):
        sync(fd)


def _no_sync_of_the_folder(sync: Callable[[int], None], fd: int) -> None:
    if not _is_directory(fd):
        sync(fd)


class _LateSync:
    """The file is synced after it was renamed."""

    def __init__(self) -> None:
        self.files: list[int] = []

    def __call__(self, sync: Callable[[int], None], fd: int) -> None:
        if not _is_directory(fd):
            self.files.append(os.dup(fd))
            return
        for late in self.files:
            sync(late)
            os.close(late)
        self.files.clear()
        sync(fd)


def without(by: Callable[..., Any], act: Callable[[Path], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        with _syncs(by() if isinstance(by, type) else by):
            act(folder)

    return changed


def attributes_last(folder: Path) -> None:
    """The owner is set when the new file is in place."""
    (folder / "y.pt").touch()
    save(folder / "y.pt", 2)
    os.rename(folder / "y.pt", folder / "x.pt")
    os.chown(folder / "x.pt", 1234, 4321)
    (folder / "x.pt").chmod(0o640)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def stock_and_fsync(folder: Path) -> None:
    fastserial.uninstall()
    try:
        with (folder / "x.pt").open("wb") as file:
            torch.save(state(2), file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        fastserial.install()


def stock_and_rename(folder: Path) -> None:
    fastserial.uninstall()
    try:
        torch.save(state(2), folder / "y.pt")
        os.replace(folder / "y.pt", folder / "x.pt")
    finally:
        fastserial.install()


def by_lightning(folder: Path) -> None:
    from lightning.fabric.utilities.cloud_io import _atomic_save

    fastserial.uninstall()
    # its temporary file: on another file system it would be copied over the old one
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        _atomic_save(state(2), folder / "x.pt")
    finally:
        tempfile.tempdir = before
        fastserial.install()


def by_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {key: one.clone() for key, one in state(2)["tensors"].items()}
    save_file(tensors, folder / "x.pt")


def latest_first(folder: Path) -> None:
    """The folder of the checkpoint before is removed before the new one is synced."""
    shutil.rmtree(folder / "run")
    third_step(folder)


def _folder_matters(path: str) -> bool:
    return _TEMPORARY not in path and not path.endswith(".lock")


_LOSSY = frozenset({"old", "new", "new, of another owner", "damaged"})

OURS: dict[str, Workload] = {
    "new file": Workload(nothing, overwrite),
    "overwrite": Workload(an_old_file, overwrite),
    "overwrite through a link": Workload(
        a_linked_file,
        lambda folder: save(folder / "link.pt", 2),
        lambda folder, before, after: a_file(folder, before, after, "link.pt"),
    ),
    "small": Workload(an_old_file, overwrite, options={"small_file": 8 << 20}),
    "legacy": Workload(an_old_legacy_file, lambda folder: save(folder / "x.pt", 2, legacy=True)),
    "with a temporary name": Workload(an_old_file, with_a_name),
    "`durable=False`": Workload(
        an_old_file,
        overwrite,
        a_checked_file,
        may=_LOSSY,
        then=_LOSSY,
        options={"durable": False},
    ),
    "`base=`": Workload(an_old_base, with_a_base),
    "`save_async`": Workload(an_old_file, in_the_background),
    "`FastFileWriter`": Workload(an_old_file, into_a_writer),
    "`Checkpointer`, new folder": Workload(nothing, third_step, resumed, matters=_folder_matters),
    "`Checkpointer`, prunes": Workload(two_steps, third_step, resumed, matters=_folder_matters),
    "`Checkpointer`, its mirror's run": Workload(
        nothing,
        with_a_mirror,
        the_run_of_a_mirror,
        then=frozenset({"old", "new"}),
        matters=lambda path: path.endswith(".fastserial.run"),
        needs=("obstore",),
    ),
    "`distributed.save`, 2 ranks": Workload(ranks_save_one(1), ranks_save_one(2), ranks=2),
    "DCP folder, 2 ranks, new": Workload(
        nothing, ranks_save_dcp(2), a_dcp_folder, ranks=2, matters=_folder_matters
    ),
    "DCP folder, 2 ranks": Workload(
        ranks_save_dcp(1), ranks_save_dcp(2), a_dcp_folder, ranks=2, matters=_folder_matters
    ),
    "safetensors folder, 2 ranks": Workload(
        nothing, ranks_save_safetensors, a_safetensors_folder, ranks=2, matters=_folder_matters
    ),
}

CONTROLS: dict[str, Workload] = {
    "the file is not synced": Workload(
        an_old_file, without(_no_sync_of_the_file, overwrite), loses=True
    ),
    "the folder is not synced": Workload(
        an_old_file, without(_no_sync_of_the_folder, overwrite), loses=True
    ),
    "renamed before the sync": Workload(an_old_file, without(_LateSync, overwrite), loses=True),
    "owner and mode come last": Workload(an_old_file, attributes_last, loses=True),
    "stock `torch.save` and `fsync`": Workload(an_old_file, stock_and_fsync, loses=True),
    "stock `torch.save` and a rename": Workload(an_old_file, stock_and_rename, loses=True),
    "the old folder is removed first": Workload(
        two_steps, latest_first, resumed, loses=True, matters=_folder_matters
    ),
    "stock's DCP folder, 2 ranks": Workload(
        ranks_save_dcp(1, dcp.FileSystemWriter),
        ranks_save_dcp(2, dcp.FileSystemWriter),
        a_dcp_folder,
        ranks=2,
        loses=True,
        matters=_folder_matters,
    ),
    "Lightning": Workload(an_old_file, by_lightning, loses=True, needs=("lightning",)),
    "safetensors": Workload(an_old_file, by_safetensors, loses=True, needs=("safetensors",)),
}

ALL = {**OURS, **CONTROLS}


# What a process imports that forks those which run workloads.
IMPORTED = ("torch.distributed.checkpoint", "torch.distributed.tensor", "workloads")


def variables() -> dict[str, str]:
    """Return the variables of the environment of such a process."""
    path = [str(Path(__file__).parent), processes.environment()["PYTHONPATH"]]
    return {"PYTHONPATH": os.pathsep.join(path)}


def folder_name(name: str) -> str:
    """Return the folder of a workload, below that of all."""
    return f"w{list(ALL).index(name)}"
