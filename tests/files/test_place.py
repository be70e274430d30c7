"""Where a save goes: to a new file or into the old one, and to the file that stock would write."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.identity import SMALL, fast, last_save
from support.loading import last_report
from support.others import in_child

import fastserial
from fastserial import engines
from fastserial.engines import io_uring

HELD = "this process has the file open or locked"


# -- files that this process has open ----------------------------------------------------------


def test_a_lock_stays_on_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with path.open("rb") as mine, fast():
        fcntl.flock(mine, fcntl.LOCK_EX)
        torch.save(SMALL, path)
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_is_open_for_reading_is_replaced(tmp_path: Path) -> None:
    """A leaked handle does not make the save less safe."""
    path = tmp_path / "a.pt"
    with fast():
        torch.save("old", path)
        with path.open("rb") as held:
            torch.save("new", path)
            assert last_save().fallback is None
            assert (torch.load(held), torch.load(path)) == ("old", "new")


def test_a_mapped_file_is_replaced(tmp_path: Path) -> None:
    """Emptied, as by stock, it would kill the process that touches the old tensors."""
    path = tmp_path / "a.pt"
    with fast():
        torch.save({"x": torch.arange(300_000.0)}, path)
        mapped = torch.load(path, mmap=True)["x"]
        torch.save(SMALL, path)
        assert last_save().fallback is None
    assert mapped.equal(torch.arange(300_000.0))


# -- system calls that a filter (seccomp) refuses -----------------------------------------------

CALLS = {"faccessat2": 439, "fallocate": 285, "preadv2": 327}  # numbers of x86-64, as below
IO_URING = {"io_uring_setup": 425, "io_uring_enter": 426}
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
SET_NO_NEW_PRIVS, SET_SECCOMP, MODE_FILTER = 38, 22, 2


def refuse(numbers: Sequence[int], error: int) -> None:
    """From now on, these system calls fail with an error number in this process."""
    steps = [(LOAD, 0, 0, 0)]
    for number in numbers:
        steps += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | error)]
    steps.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(SET_SECCOMP, MODE_FILTER, program, 0, 0) == 0, "no filter may be set"


def save_and_load(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Save a new file and over an old one; load what was saved."""
    for name in ("new.pt", "old.pt"):
        torch.save(state, folder / name)
        report = last_save()
        assert report.durable
        assert report.fallback is None
        assert torch.load(folder / name)["x"].numpy().tobytes() == state["x"].numpy().tobytes()
        assert last_report().fallback is None
    assert sorted(os.listdir(folder)) == ["new.pt", "old.pt"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86-64's")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@pytest.mark.parametrize("names", [*CALLS, *IO_URING, " ".join(CALLS)])
def test_system_calls_that_a_filter_refuses(tmp_path: Path, names: str, error: int) -> None:
    """A container's filter says so; stock torch needs none of these calls."""
    state = {"x": torch.arange(500_000.0)}
    torch.save("old", tmp_path / "old.pt")

    def there() -> None:
        io_uring._missing.cache_clear()
        refuse([(CALLS | IO_URING)[name] for name in names.split()], error)
        if names in IO_URING:  # the engine says that it cannot run; the usual one saves
            with pytest.raises(fastserial.EngineUnavailableError, match="cannot run here"):
                fastserial.install(engine="io_uring")
            missing = {one.name: one.missing for one in engines.survey()}
            assert missing["io_uring"] is not None
            assert missing["threads"] is None
        save_and_load(tmp_path, state)

    with fast(small_file=0):
        in_child(there)


# -- callers that have no stock behind them ----------------------------------------------------


def test_a_writer_says_what_to_do_instead(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with path.open("r+b"), pytest.raises(fastserial.WriteError) as caught:
        fastserial.FastFileWriter(path)
    text = str(caught.value)
    assert HELD in text
    assert "close the file before it is saved to" in text
    assert "Save to another path" in text
    assert str(path) in text
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.pt"]
