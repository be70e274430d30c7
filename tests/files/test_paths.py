"""A program that changes its directory: a save goes where its path led when it was called."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.identity import fast

import fastserial
from fastserial import Checkpointer, distributed
from fastserial.distributed import FastStorageWriter
from fastserial.errors import write_error
from fastserial.files import linux
from fastserial.files.destination import Replacement, Retries
from fastserial.files.durable import make_folder, sync_folders
from fastserial.files.paths import absolute
from fastserial.saving.writer import FastFileWriter

STATE = {"x": torch.arange(1000.0)}


def _write(path: str) -> None:
    with FastFileWriter(path) as file:
        torch.save(STATE, file)


def _legacy(path: str) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


SAVES: dict[str, Callable[[str], object]] = {
    "zip": lambda path: torch.save(STATE, path),
    "legacy": _legacy,
    "save": lambda path: fastserial.save(STATE, path),
    "base": lambda path: fastserial.save(STATE, path, base=path),
    "save_async": lambda path: fastserial.save_async(STATE, path).wait(),
    "writer": _write,
    "safetensors": lambda path: save_file(STATE, path),
    "distributed": lambda path: distributed.save(STATE, path),
    "distributed async": lambda path: distributed.save_async(STATE, path).wait(),
}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two folders with a file of the same name, which others may read in the second one."""
    found = tmp_path / "first", tmp_path / "second"
    for folder, mode in zip(found, (0o600, 0o666), strict=True):
        (folder / "in").mkdir(parents=True)
        for path in (folder / "x.pt", folder / "in" / "x.pt"):
            path.write_bytes(b"old")
            path.chmod(mode)
            os.setxattr(path, "user.folder", folder.name.encode())  # as an ACL is one
        (folder / "link.pt").symlink_to("in/x.pt")
    monkeypatch.chdir(found[0])
    return found


@pytest.mark.parametrize("path", ["x.pt", "in/x.pt", "link.pt"])
@pytest.mark.parametrize("how", SAVES)
def test_a_save(
    how: str, path: str, folders: tuple[Path, Path], named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory changes before the commit."""
    first, second = folders
    commit = Replacement.commit

    def later(replacement: Replacement) -> None:
        os.chdir(second)
        commit(replacement)

    monkeypatch.setattr(Replacement, "commit", later)
    with fast(safetensors=True):
        SAVES[how](path)
    load = load_file if how == "safetensors" else torch.load
    assert torch.equal(load(first / path)["x"], STATE["x"])
    if how != "safetensors":  # which makes a file of its own, as safetensors does
        assert (first / path).stat().st_mode & 0o777 == 0o600
        assert os.getxattr(first / path, "user.folder") == b"first"
    assert (second / path).read_bytes() == b"old"
    assert sorted(os.listdir(second)) == ["in", "link.pt", "x.pt"]
    assert sorted(os.listdir(first)) == ["in", "link.pt", "x.pt"]


def test_a_save_that_is_repeated(folders: tuple[Path, Path]) -> None:
    first, second = folders
    retries = Retries("new.pt", True, False, False, 1)
    os.chdir(second)
    found = retries.open()
    assert isinstance(found, Replacement)
    found.commit()
    assert (first / "new.pt").exists()
    assert not (second / "new.pt").exists()


def test_a_checkpointer(folders: tuple[Path, Path]) -> None:
    first, second = folders
    with Checkpointer("run", {"x": 1}) as checkpointer:
        os.chdir(second)
        checkpointer.save(1)
        checkpointer.wait()
    assert os.listdir(first / "run")
    assert not (second / "run").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_in_the_background(folders: tuple[Path, Path]) -> None:
    """torch's thread saves after the program has changed its directory."""
    first, second = folders
    writer = FastStorageWriter("folder")
    writer.stage(STATE)
    os.chdir(second)
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    assert (first / "folder").exists()
    assert not (second / "folder").exists()
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    assert (second / "folder").exists(), "as with stock"


def test_a_directory_without_a_usable_path(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below one that may not be searched: what stock saves is saved."""

    def refuse() -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    assert absolute("x/../y") == f"{folders[0]}/x/../y"
    monkeypatch.setattr(os, "getcwd", refuse)
    assert absolute("x.pt") == "x.pt"
    with fast():
        torch.save(STATE, "x.pt")
    assert torch.equal(torch.load(folders[0] / "x.pt")["x"], STATE["x"])


def test_above_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel follows the link first; the text of the path leads elsewhere."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    monkeypatch.chdir(tmp_path)
    with fast():
        torch.save(STATE, "link/../x.pt")
        distributed.save(STATE, "link/../y.pt")
        make_folder("link/../new", True)
        sync_folders(["link/../new"])
        opened = pickle.dumps(fastserial.open("link/../x.pt"))
    assert sorted(os.listdir("a")) == ["b", "new", "x.pt", "y.pt"]
    monkeypatch.chdir("/")
    with pickle.loads(opened) as file:
        assert torch.equal(file.get_tensor("x"), STATE["x"])


@pytest.mark.parametrize(
    ("magic", "device", "is_remote"),
    [(0x794C7630, 0, False), (0x9123683E, 0, False), (0x6969, 0, True), (0x65735546, 0, True),
     (0x2011BAB0, 8, False)],
    ids=["overlayfs", "btrfs", "NFS", "FUSE", "exFAT"],
)  # fmt: skip
def test_a_local_disk_that_fails_is_not_asked_again(
    tmp_path: Path, magic: int, device: int, is_remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any type, also below overlayfs: only a network or a FUSE process comes back."""
    monkeypatch.setattr(linux, "magic_of", lambda path: magic)
    monkeypatch.setattr(os, "major", lambda number: device)
    retries = Retries(tmp_path / "x.pt", True, False, False, 30)
    assert retries.wait(write_error(errno.EIO, "x.pt", "failed")) is is_remote
