"""Who may read the new file, what else it takes over from the old one, and who hears of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import struct
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.identity import fast
from support.others import as_user

import fastserial
from fastserial.files import destination
from fastserial.reports import SAVES
from fastserial.saving.writer import FastFileWriter

_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY_IN_PARTICULAR = 0xFFFFFFFF
_ANN, _BOB, _CLUB = 4001, 4002, 4003


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


@pytest.mark.parametrize("acls", [True, False])
@pytest.mark.parametrize("umask", [0o077, 0o022, 0o000])
def test_a_kernel_that_ignores_the_umask_opens_no_file_to_more_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, acls: bool
) -> None:
    """Linux before 6.0 does with O_TMPFILE, where a mount has no ACLs."""
    made = []

    def old_kernel(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE != os.O_TMPFILE or acls:
            return os_open(path, flags, *arguments, **named)
        before = os.umask(0)
        try:
            made.append(os_open(path, flags, *arguments, **named))
        finally:
            os.umask(before)
        return made[-1]

    def no_acls(*arguments: Any, **named: Any) -> bytes:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    os_open = os.open
    monkeypatch.setattr(os, "open", old_kernel)
    if not acls:
        monkeypatch.setattr(os, "getxattr", no_acls)
    before = os.umask(umask)
    try:
        with fast():
            torch.save([1], tmp_path / "ours")
        (tmp_path / "stocks").touch()
    finally:
        os.umask(before)
    assert bool(made) is not acls
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "stocks").stat().st_mode


def save(path: Path) -> Any:
    with FastFileWriter(path) as writer:
        writer.write(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == [path.name]
    return writer.report


def save_as_ann(path: Path, *groups: int) -> list[str]:
    """Save with `torch.save` as another user; return why torch wrote the file itself."""

    def save_there() -> list[str]:
        SAVES.clear()
        torch.save("new", path.name)
        return [way.reason for way in fastserial.summary().saves.why_torch]

    with fast():
        torch.save("new", path.parent.parent / "warm.pt")  # imports what Ann may not read
        fastserial.summary()
        return cast(list[str], as_user(save_there, path.parent, _ANN, groups))


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
    """And so are other attributes."""
    target.chmod(0o600)
    set_attribute(target, "user.long", bytes(range(256)) * 4)
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
    why = "a new file cannot have its owner, mode, ACL or attributes"
    assert save_as_ann(target) == [why]
    check_saved(target, before)
    assert target.stat().st_ino == inode
    assert save_as_ann(target, _CLUB) == []
    check_saved(target, before)
    assert target.stat().st_ino != inode


# -- programs that watch the directory -----------------------------------------------------------


@pytest.mark.parametrize("there", [True, False])
def test_a_watcher_sees_one_whole_file(target: Path, named: bool, there: bool) -> None:
    """As docs/guide/durability.md says, under the target's name."""
    if not there:
        target.unlink()
    libc, close_write, moved_to, create = ctypes.CDLL(None), 0x8, 0x80, 0x100
    fd = libc.inotify_init1(os.O_NONBLOCK)
    events = close_write | moved_to | create
    assert libc.inotify_add_watch(fd, os.fsencode(target.parent), events) > 0
    with os.fdopen(fd, "rb", buffering=0) as watch:
        save(target)
        data, seen = watch.read(4096), []
    while data:
        _, mask, _, length = struct.unpack_from("iIII", data)
        seen.append((mask, data[16 : 16 + length].rstrip(b"\0")))
        data = data[16 + length :]
    first = moved_to if there or named else create
    assert [mask for mask, name in seen if name == b"x.pt"] == [first, close_write]
