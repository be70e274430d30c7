"""Who may read the new file, what else it takes over from the old one, and who hears of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run

from fastserial.errors import WriteError
from fastserial.files import destination
from fastserial.saving.writer import FastFileWriter

_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY_IN_PARTICULAR = 0xFFFFFFFF
_ANN, _BOB, _CLUB = 4001, 4002, 4003
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_APPEND_FL = 0x80086601, 0x40086602, 0x20


def acl(*entries: tuple[int, int] | tuple[int, int, int]) -> bytes:
    """Return an access control list of (kind, permissions) or (kind, permissions, user)."""
    packed = [struct.pack("<HHI", *(*entry, _NOBODY_IN_PARTICULAR)[:3]) for entry in entries]
    return struct.pack("<I", 2) + b"".join(packed)


SECRET = acl((_USER_OBJ, 6), (_USER, 6, _BOB), (_GROUP_OBJ, 0), (_MASK, 6), (_OTHER, 0))
FOR_BOB = acl((_USER_OBJ, 7), (_USER, 7, _BOB), (_GROUP_OBJ, 5), (_MASK, 7), (_OTHER, 5))


def set_attribute(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip(f"needs a file system with {name} for temporary files")


def everything(path: Path) -> tuple[Any, ...]:
    """Return what decides who may do what with a file, and its other attributes."""
    found = path.stat()
    extended = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode), extended


def save(path: Path) -> Any:
    with FastFileWriter(path) as writer:
        writer.write(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == [path.name]
    return writer.report


def save_as(path: Path, *words: str, **job: Any) -> dict[str, Any]:
    """Save in another process, which need not be allowed to see what is above the folder."""
    job["path"] = path.name
    ended = run("write_as", json.dumps(job), under=words, cwd=path.parent)
    found: dict[str, Any] = json.loads(ended.out)
    return found


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "x.pt"
    path.write_bytes(b"old")
    return path


# -- attributes ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("named")
def test_an_acl_that_shuts_the_group_out_is_kept(target: Path) -> None:
    target.chmod(0o600)
    set_attribute(target, _ACCESS, SECRET)
    before = everything(target)
    assert before[2] == 0o660, "the mask shows as the group's permissions"
    assert save(target).fallback is None
    assert everything(target) == before


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o666, 0o200])
def test_the_folder_hands_nothing_down_to_a_file_that_is_replaced(target: Path, mode: int) -> None:
    set_attribute(target.parent, _DEFAULT, FOR_BOB)
    target.chmod(mode)
    before = everything(target)
    need_root() if mode == 0o200 else None
    assert save(target).fallback is None
    assert everything(target) == before


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
@pytest.mark.parametrize("default_acl", [False, True])
def test_a_new_file_is_as_open_would_make_it(target: Path, mask: int, default_acl: bool) -> None:
    if default_acl:
        set_attribute(target.parent, _DEFAULT, FOR_BOB)
    other = target.parent.parent / "other"
    shutil.copytree(target.parent, other, symlinks=True)
    if default_acl:
        set_attribute(other, _DEFAULT, FOR_BOB)
    target.unlink()
    before = os.umask(mask)
    try:
        with open(other / "y.pt", "wb"):
            pass
        save(target)
    finally:
        os.umask(before)
    assert everything(target) == everything(other / "y.pt")


@pytest.mark.usefixtures("named")
def test_extended_attributes_are_kept(target: Path) -> None:
    set_attribute(target, "user.run", b"17")
    os.setxattr(target, "user.long", bytes(range(256)) * 4)
    before = everything(target)
    save(target)
    assert everything(target) == before


def test_file_systems_without_extended_attributes(
    target: Path, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: Any, **keywords: Any) -> Any:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with monkeypatch.context() as patch:
        for name in ("listxattr", "getxattr", "setxattr", "removexattr"):
            patch.setattr(os, name, refuse)
        assert save(target).fallback is None


def test_at_no_moment_may_more_people_read_it(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is a file with a name: whoever has opened it can read what comes later."""
    need_root()
    monkeypatch.setattr(destination, "_can_link", lambda: False)
    set_attribute(target.parent, _DEFAULT, FOR_BOB)
    os.chown(target, _ANN, _CLUB)
    target.chmod(0o600)
    set_attribute(target, _ACCESS, SECRET)
    steps = []

    def watched(name: str) -> Any:
        real = getattr(os, name)

        def call(*words: Any, **keywords: Any) -> Any:
            done = real(*words, **keywords)
            for path in target.parent.glob(".x.pt*"):
                whole, extended = path.stat(), {}
                with contextlib.suppress(OSError):
                    extended[_ACCESS] = os.getxattr(path, _ACCESS)
                steps.append(name)
                if extended.get(_ACCESS) != SECRET:
                    assert whole.st_mode & 0o077 == 0, steps
                else:
                    assert (whole.st_uid, whole.st_gid) == (_ANN, _CLUB)
            return done

        return call

    for name in ("open", "fchown", "fchmod", "setxattr", "removexattr"):
        monkeypatch.setattr(os, name, watched(name))
    before = everything(target)
    with FastFileWriter(target) as writer:
        writer.write(b"new")
    assert everything(target) == before
    assert {"open", "fchown", "setxattr"} <= set(steps)


# -- changed during the save ---------------------------------------------------------------------


@pytest.mark.usefixtures("named")
def test_a_chmod_during_the_save_survives(target: Path) -> None:
    target.chmod(0o644)
    with FastFileWriter(target) as writer:
        writer.write(b"new")
        target.chmod(0o600)
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


@pytest.mark.usefixtures("named")
def test_a_change_that_cannot_be_followed_keeps_the_old_file(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fchmod(fd: int, mode: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with (
        pytest.raises(WriteError, match="save again; the previous file is intact"),
        FastFileWriter(target) as writer,
    ):
        writer.write(b"new")
        target.chmod(0o600)
        monkeypatch.setattr(os, "fchmod", fchmod)
    assert target.read_bytes() == b"old"
    assert os.listdir(target.parent) == ["x.pt"]


# -- where a new file cannot have them -----------------------------------------------------------


def check_saved(target: Path, before: tuple[Any, ...]) -> None:
    assert torch.load(target) == "new"
    assert everything(target) == before
    assert os.listdir(target.parent) == ["x.pt"]


def test_a_group_that_is_not_the_users(target: Path) -> None:
    """`0640 ann:club`, and Ann is not in the club: `ann:ann` would let others read it."""
    need_root()
    os.chown(target.parent, _ANN, _ANN)
    os.chown(target, _ANN, _CLUB)
    target.chmod(0o640)
    before, inode = everything(target), target.stat().st_ino
    assert save_as(target, user=_ANN) == {
        "by_torch": "a new file cannot have its owner, mode, ACL or attributes"
    }
    check_saved(target, before)
    assert target.stat().st_ino == inode
    assert save_as(target, user=_ANN, groups=[_CLUB]) == {"by_torch": None}
    check_saved(target, before)
    assert target.stat().st_ino != inode


@pytest.mark.parametrize(
    ("missing", "sticky", "what"),
    [("chown", False, "its owner"), ("fowner", True, ""), ("fowner", False, "mode")],
)
def test_a_root_that_may_not_do_anything(
    target: Path, missing: str, sticky: bool, what: str
) -> None:
    """Sticky directories let nobody else replace a file; that was only seen at the end."""
    need_root()
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (apt-get install util-linux)")
    os.chown(target.parent, _ANN, _ANN)
    target.parent.chmod(0o1777 if sticky else 0o777)
    os.chown(target, _BOB, _CLUB)
    before = everything(target)
    words = ["setpriv", f"--bounding-set=-{missing}", f"--inh-caps=-{missing}"]
    assert what in save_as(target, *words)["by_torch"]
    check_saved(target, before)
    if not sticky:
        assert save_as(target) == {"by_torch": None}
        check_saved(target, before)


def test_an_owner_whom_a_container_does_not_know(target: Path) -> None:
    """The kernel shows 65534, which may be somebody in there."""
    need_root()
    target.parent.chmod(0o777)
    os.chown(target, _BOB, _CLUB)
    target.chmod(0o666)
    before = everything(target)
    try:
        told = save_as(target, strangers=True)
    except AssertionError as error:
        if "no user namespace" in str(error):
            pytest.skip("needs user namespaces")
        raise
    assert told == {"by_torch": "a new file cannot have its owner, mode, ACL or attributes"}
    check_saved(target, before)


# -- append-only directories ---------------------------------------------------------------------


@contextlib.contextmanager
def append_only(folder: Path) -> Iterator[None]:
    """Let a directory only grow (`chattr +a`)."""
    need_root()
    fd = os.open(folder, os.O_RDONLY)
    try:
        flags = struct.unpack("q", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8)))[0]
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("q", flags | _FS_APPEND_FL))
    except OSError:
        os.close(fd)
        pytest.skip("needs a file system with `chattr +a` for temporary files")
    try:
        yield
    finally:
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("q", flags))
        os.close(fd)


@pytest.mark.parametrize("there", [True, False])
def test_a_file_in_an_append_only_directory(target: Path, named: bool, there: bool) -> None:
    """torch writes it; and nothing is left that could never be removed."""
    before = everything(target)
    if not there:
        target.unlink()
    with append_only(target.parent):
        told = save_as(target)
    assert told == {"by_torch": "nothing in an append-only directory can be replaced"}
    if there:
        check_saved(target, before)
    assert os.listdir(target.parent) == ["x.pt"]


# -- programs that watch the directory -----------------------------------------------------------


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("there", [True, False])
def test_a_watcher_sees_one_whole_file(target: Path, there: bool) -> None:
    """As docs/guide/durability.md says, under the target's name."""
    if not there:
        target.unlink()
    libc, close_write, moved_to = ctypes.CDLL(None), 0x8, 0x80
    fd = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(fd, os.fsencode(target.parent), close_write | moved_to) > 0
    with os.fdopen(fd, "rb", buffering=0) as watch:
        save(target)
        events, seen = watch.read(4096), []
    while events:
        _, mask, _, length = struct.unpack_from("iIII", events)
        seen.append((mask, events[16 : 16 + length].rstrip(b"\0")))
        events = events[16 + length :]
    assert [mask for mask, name in seen if name == b"x.pt"] == [moved_to, close_write]
