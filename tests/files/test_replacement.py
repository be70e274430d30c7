"""Replacing a file: names, locks, and what each failing step leaves and says."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.identity import fast

from fastserial.errors import MissingDirectoryError, WriteError
from fastserial.files import destination as replacement_module
from fastserial.files import linux
from fastserial.files.destination import Replacement, StockWay, open_path
from fastserial.saving.writer import FastFileWriter


def replacement_of(path: Path) -> Replacement:
    found = open_path(str(path), True)
    assert isinstance(found, Replacement)
    return found


def write(path: Path, data: bytes) -> None:
    with FastFileWriter(path) as file:
        file.write(data)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "x.pt"
    path.write_bytes(b"old")
    path.chmod(0o660)  # not what a new file has
    return path


def test_others_replace_and_remove_the_file_meanwhile(tmp_path: Path) -> None:
    """As often as it changes between two looks at it, no save fails: stock's does not."""

    def work(number: int) -> None:
        for _ in range(200):
            torch.save({"x": number}, tmp_path / "x.pt")
            with contextlib.suppress(FileNotFoundError):
                (tmp_path / "x.pt").unlink()

    with fast(durable=False), ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert os.listdir(tmp_path) == []


# -- temporary names -----------------------------------------------------------------------------


def test_two_at_once_take_two_names(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement_module, "_can_link", lambda: False)
    first, second = replacement_of(target), replacement_of(target)
    assert first.named != second.named
    for number, replacement in enumerate((first, second)):
        os.write(replacement.fd, b"%d" % number)
        replacement.sync()
        replacement.commit()
    assert target.read_bytes() == b"1"
    assert os.listdir(target.parent) == ["x.pt"]


@pytest.mark.parametrize("other", [None, b"another's half file"])
def test_a_name_that_leads_elsewhere_is_not_renamed(
    target: Path, other: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement_module, "_can_link", lambda: False)
    file = FastFileWriter(target)
    file.write(b"new")
    (name,) = set(os.listdir(target.parent)) - {"x.pt"}
    (target.parent / name).unlink()
    if other is not None:
        (target.parent / name).write_bytes(other)
    with pytest.raises(WriteError, match="removed the new file, or put another") as caught:
        file.close()
    assert caught.value.errno == errno.ESTALE
    assert "the previous file is intact" in str(caught.value)
    assert target.read_bytes() == b"old"
    left = set(os.listdir(target.parent)) - {"x.pt"}
    assert left == (set() if other is None else {name}), "another's file is not ours to remove"


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOENT, errno.ENOTTY])
def test_a_file_without_a_name_that_may_not_get_one(
    target: Path, number: int, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A security module, FUSE without links: what was written is copied under a name."""
    monkeypatch.setattr(replacement_module, "_linkless", set())
    data = os.urandom((8 << 20) + 5)
    if is_new:
        target.unlink()
    with failing(monkeypatch, "link", number):
        for fallback in ("the file system does not link", "None"):
            file = FastFileWriter(target)
            file.write(data)
            file.close()
            assert target.read_bytes() == data
            assert file.report is not None
            assert file.report.durable
            assert str(file.report.fallback).startswith(fallback)
            assert is_new or target.stat().st_mode & 0o777 == 0o660
            assert os.listdir(target.parent) == ["x.pt"]


def test_the_copy_of_a_file_without_a_name_is_locked_by_another(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host looks just then whether it is a leftover: another name is taken."""
    monkeypatch.setattr(replacement_module, "_linkless", set())
    real, answers = replacement_module._lock, iter([True, False])
    monkeypatch.setattr(replacement_module, "_lock", lambda fd: next(answers, True) and real(fd))
    with failing(monkeypatch, "link", errno.EPERM):
        write(target, b"new")
    assert next(answers, None) is None
    assert target.read_bytes() == b"new"
    assert os.listdir(target.parent) == ["x.pt"]


def test_no_descriptor_is_left_at_the_end(
    target: Path, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with FastFileWriter(target) as file:
        file.write(b"new")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
        try:
            file.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert target.read_bytes() == b"new"
    assert os.listdir(target.parent) == ["x.pt"]


def test_a_directory_that_is_removed_during_the_save(tmp_path: Path, named: bool) -> None:
    path = tmp_path / "folder" / "x.pt"
    path.parent.mkdir()
    file = FastFileWriter(path)
    file.write(b"new")
    shutil.rmtree(path.parent)
    with pytest.raises(MissingDirectoryError, match="directory was removed"):
        file.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTTY])
def test_a_file_system_without_locks(
    target: Path, named: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    write(target, b"new")
    assert target.read_bytes() == b"new"
    assert os.listdir(target.parent) == ["x.pt"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY])
def test_a_file_system_that_makes_no_file_without_a_name(
    target: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE servers answer what they like: the file is replaced all the same."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **keywords: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args, **keywords)

    before = target.stat()
    monkeypatch.setattr(os, "open", refuse)
    write(target, b"new")
    assert target.read_bytes() == b"new"
    assert target.stat().st_ino != before.st_ino
    assert os.listdir(target.parent) == ["x.pt"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_a_file_system_that_cannot_be_tried_now(
    target: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, and not taken for one that cannot replace files."""
    monkeypatch.setattr(replacement_module, "_CAPABLE", frozenset())
    monkeypatch.setattr(replacement_module, "_incapable", {})
    with failing(monkeypatch, "pwrite", number):
        replacement_of(target).discard()
    assert not replacement_module._incapable
    write(target, b"new")
    assert list(replacement_module._incapable.values()) == [None]


# -- steps that fail -----------------------------------------------------------------------------


@contextlib.contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, when: Any = lambda *args: True
) -> Iterator[None]:
    """Make a function of `os` fail."""
    real = getattr(os, name)

    def call(*args: Any, **keywords: Any) -> Any:
        if when(*args):
            raise OSError(number, os.strerror(number))
        return real(*args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        yield


def is_directory(fd: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{fd}")


STEPS = [
    ("fsync", errno.EIO, "kernel log"),
    ("fsync", errno.ENOSPC, "Free space"),
    ("fsync", errno.EDQUOT, "quota"),
    ("pwrite", errno.ENOSPC, "Free space"),
    ("rename", errno.ESTALE, "remount it"),
    ("rename", errno.EROFS, "Remount"),
    ("rename", errno.ENOTCONN, "FUSE"),
    ("rename", errno.ENOENT, "another program or host removed"),
    ("fchmod", errno.EIO, "kernel log"),
]


@pytest.mark.parametrize(("call", "number", "remedy"), STEPS)
def test_an_error_says_what_happened_and_keeps_the_old_file(
    target: Path,
    named: bool,
    call: str,
    number: int,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with failing(monkeypatch, call, number), pytest.raises(WriteError) as caught:
        write(target, b"new")
    error = caught.value
    assert isinstance(error, OSError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, OSError)
    assert error.errno == (errno.ESTALE if number == errno.ENOENT else number)
    assert error.filename == str(target)
    assert "the previous file is intact" in str(error)
    assert remedy in str(error)
    assert target.read_bytes() == b"old"
    assert os.listdir(target.parent) == ["x.pt"]


def test_an_error_of_a_first_save_tells_of_no_previous_file(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.unlink()
    with failing(monkeypatch, "fsync", errno.EIO), pytest.raises(WriteError) as caught:
        write(target, b"new")
    assert "no file was made" in str(caught.value)
    assert "previous" not in str(caught.value)
    assert not os.listdir(target.parent)


def test_an_error_of_the_last_sync_says_that_the_new_file_is_there(
    target: Path, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        failing(monkeypatch, "fsync", errno.EIO, is_directory),
        pytest.raises(WriteError, match="in place") as caught,
    ):
        write(target, b"new")
    assert "intact" not in str(caught.value)
    assert target.read_bytes() == b"new"
    assert os.listdir(target.parent) == ["x.pt"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_directory_that_cannot_be_synced_is_named_in_the_report(
    target: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing(monkeypatch, "fsync", number, is_directory), FastFileWriter(target) as file:
        file.write(b"new")
    assert file.report is not None
    assert file.report.fallback == "the file system cannot sync a directory"
    assert file.report.durable is False
    assert target.read_bytes() == b"new"


# -- where a file cannot be replaced -------------------------------------------------------------


def test_a_mount_point_is_not_replaced(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "is_mount_point", lambda path, device: True)
    assert open_path(str(target), True) == StockWay("the file is a mount point")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.EOVERFLOW])
def test_an_owner_that_cannot_be_set(
    target: Path, named: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL: in a rootless container, where the owner has no number."""

    def fchown(fd: int, user: int, group: int) -> None:
        raise OSError(number, os.strerror(number))

    if os.geteuid() != 0:
        pytest.skip("needs root, to make a file that is another user's")
    os.chown(target, 1234, 1234)
    before = target.stat()
    monkeypatch.setattr(os, "fchown", fchown)
    with pytest.raises(WriteError, match="a new file cannot have its owner") as caught:
        write(target, b"new")
    assert caught.value.filename == str(target)
    assert target.read_bytes() == b"old"
    assert (target.stat().st_ctime_ns, target.stat().st_uid) == (before.st_ctime_ns, 1234)
    assert os.listdir(target.parent) == ["x.pt"]
    with fast():
        torch.save("new", target)
    assert torch.load(target) == "new"
    assert (target.stat().st_uid, target.stat().st_ino) == (1234, before.st_ino)
    assert os.listdir(target.parent) == ["x.pt"]


@pytest.mark.parametrize("number", [errno.ENODATA, errno.ENOTTY])
def test_attributes_that_cannot_be_read(
    target: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch needs none of them, whatever a FUSE server answers."""
    os.setxattr(target, "user.x", b"x")
    before = target.stat()
    with failing(monkeypatch, "getxattr", number), fast():
        torch.save("new", target)
    assert torch.load(target) == "new"
    assert target.stat().st_ino == before.st_ino
    assert os.listdir(target.parent) == ["x.pt"]
