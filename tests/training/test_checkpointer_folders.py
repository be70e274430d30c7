"""Checkpointer and its folder: other runs' files, other processes, ranks that see others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support import ranks
from support.lives import names

from fastserial import Checkpointer, ConfigError


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `ranks_folder` came to, by rank."""
    folder = tmp_path_factory.mktemp("folders")
    return [json.loads(out) for out in ranks.run("ranks_folder", 2, folder)]


def test_ranks_without_a_common_checkpoint_do_not_start_anew(told: list[dict[str, Any]]) -> None:
    for found in (rank["not_shared"] for rank in told):
        for name, here, there, step in (("0", 0, 1, 10), ("1", 1, 0, 20)):
            error = found[name][0]
            assert error.startswith(f"DistributedError: rank {there}: "), error
            assert f"rank {there} sees none in " in error
            assert f"{name}-of-{there}" in error
            assert f"rank {here} sees step {step} in " in error
        assert found["both"] == [10]


def test_ranks_whose_folder_is_another_process_are_all_refused(told: list[dict[str, Any]]) -> None:
    for (saved,) in (rank["held"] for rank in told):
        assert saved.startswith("DistributedConfigError: rank 0: ConfigError: "), saved
        assert "another process saves checkpoints in this folder" in saved


def test_ranks_of_which_one_cannot_list_the_folder(told: list[dict[str, Any]]) -> None:
    """Rank 0's list counts; if it fails there, all raise at once, and the next save works."""
    first, second = (rank["unlisted"] for rank in told)
    assert [first[at] for at in (0, 1, 3)] == [second[at] for at in (0, 1, 3)] == [1, 2, 4]
    assert first[2].startswith("OSError: [Errno 116] Stale file handle"), first
    assert second[2].startswith("DistributedError: rank 0: OSError: [Errno 116]"), second


def test_a_signal_to_one_rank_ends_all_with_the_checkpoint(told: list[dict[str, Any]]) -> None:
    first, second = (rank["signals"] for rank in told)
    assert first == second
    for looks, later in (("after the save", 0), ("before the save", 1)):
        step, *files = first[looks]
        assert files == [".fastserial.lock", f"step-{step - later:08d}.pt"]


def test_a_checkpointer_made_before_the_process_group(told: list[dict[str, Any]]) -> None:
    for rank in told:
        (refused,) = rank["early"]
        assert refused.startswith("ConfigError: this is one of 2 processes"), refused


def test_a_second_one_that_saves_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    folder, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(folder)
    folder.mkdir()
    first = Checkpointer(folder, {"x": 1})
    first.save(1)
    for other in (folder, link, f"{tmp_path}/other/../run"):
        with (
            Checkpointer(other, {"x": 1}) as second,
            pytest.raises(ConfigError, match=r"another Checkpointer .* `close\(\)`"),
        ):
            second.save(2)
    first.close()
    first.save(1)  # after `close()` it takes the folder again
    first.wait()
    state = {"itself": first}  # garbage that refers to itself
    state["state"] = state  # type: ignore[assignment]
    del first, state
    with Checkpointer(folder, {"x": 1}) as checkpointer:
        checkpointer.save(2)
    assert names(folder) == ["step-00000001.pt", "step-00000002.pt"]


_OTHER = """
import sys, fastserial
with fastserial.Checkpointer(sys.argv[1], {"x": 2}) as checkpointer:
    print(checkpointer.resume(), flush=True)
    try:
        print(bool(checkpointer.save(9).wait()), flush=True)
    except fastserial.ConfigError as error:
        print(error, flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def other_process(folder: Path) -> Any:
    """Another process that resumes and saves there, until a line comes."""
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER, folder], stdin=-1, stdout=-1, text=True
    ) as process:
        yield process
        process.kill()


def test_another_process_is_refused_until_this_one_ends(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"x": 1}) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        with other_process(tmp_path) as process:
            said = [process.stdout.readline() for _ in range(2)]
            process.communicate("\n")
        assert said[0] == "1\n"  # it may read
        for text in said[1:]:
            assert text.startswith(f"{tmp_path}: process {os.getpid()} on ")
        assert names(tmp_path) == ["step-00000001.pt"]
    with other_process(tmp_path) as process:  # which crashes
        assert [process.stdout.readline() for _ in range(2)] == ["1\n", "True\n"]
        with (
            Checkpointer(tmp_path, {"x": 1}) as checkpointer,
            pytest.raises(ConfigError, match=f"process {process.pid} on"),
        ):
            checkpointer.save(2)
    with Checkpointer(tmp_path, {"x": 1}) as checkpointer:
        checkpointer.save(10)
    assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (1, 9, 10)]


def test_a_forked_child_neither_keeps_nor_ends_the_lock(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, {"x": 1})
    checkpointer.save(1)
    checkpointer.wait()
    held, let_go = os.pipe()
    said, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            checkpointer.save(2)
        except ConfigError:
            os.write(told, b"refused")
        os.close(told)
        del checkpointer
        gc.collect()
        os.close(let_go)
        os.read(held, 1)
        os._exit(0)
    os.close(held)
    os.close(told)
    with os.fdopen(said, "rb") as answer:
        assert answer.read() == b"refused"
    checkpointer.close()
    with other_process(tmp_path) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["1\n", "True\n"]
    os.close(let_go)
    os.waitpid(child, 0)


def test_a_file_system_without_locks_keeps_no_other_process_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with Checkpointer(tmp_path, {"x": 1}) as checkpointer:
        checkpointer.save(1)
        with (
            Checkpointer(tmp_path, {"x": 1}) as second,
            pytest.raises(ConfigError, match="another Checkpointer of this process"),
        ):
            second.save(2)
        with other_process(tmp_path) as process:
            checkpointer.wait()
            assert [process.stdout.readline() for _ in range(2)] == ["1\n", "True\n"]
    assert "step-00000001.pt" in names(tmp_path)


@pytest.mark.parametrize("fails", [True, False], ids=["", "control"])
def test_a_lock_whose_owner_cannot_be_written(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS whose server has lost the lock: it is heard when the file is read or closed."""
    holder = Checkpointer(tmp_path, {"x": 1})
    holder.save(1)
    lock, close = (tmp_path / ".fastserial.lock").stat().st_ino, os.close
    closed = []

    def pread(fd: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def close_lock(fd: int) -> None:
        is_lock = os.fstat(fd).st_ino == lock
        close(fd)
        if is_lock:
            closed.append(fd)
            if fails:
                raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "close", close_lock)
    if fails:
        monkeypatch.setattr(os, "pread", pread)
    with monkeypatch.context() as other, pytest.raises(ConfigError, match="process"):
        other.setattr("fastserial.training.folder._holders", {})  # as if it were another process
        Checkpointer(tmp_path, {"x": 1}).save(2)
    holder.close()
    assert len(closed) == 2


def test_the_lock_of_a_host_that_is_gone_can_be_removed(tmp_path: Path) -> None:
    """On NFS 3 it may outlive the host: here a descriptor keeps it."""
    lock = tmp_path / ".fastserial.lock"
    with lock.open("w") as file:
        file.write("7 on another-host")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with Checkpointer(tmp_path, {"x": 1}) as checkpointer:
            with pytest.raises(ConfigError, match=f"7 on another-host.* is gone.*remove {lock}"):
                checkpointer.save(1)
            lock.write_text(f"7 on {os.uname().nodename}")
            with pytest.raises(ConfigError, match=r"end that process$"):
                checkpointer.save(1)
            lock.unlink()
            checkpointer.save(1)


def test_a_run_in_the_folder_of_another(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"n": 0}, keep=10) as checkpointer:
        for step in (5, 15, 28, 35):
            checkpointer.save(step)
    state = {"n": 1}
    with Checkpointer(tmp_path, state, keep=2) as checkpointer:
        with pytest.warns(UserWarning, match=r"later checkpoints than step 10's, up to step 35"):
            checkpointer.save(10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpointer.save(20)
        checkpointer.wait()
        assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (10, 20, 28, 35)]
        checkpointer.save(30)
        checkpointer.wait()  # 28 is not kept instead of 20
        assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (20, 30, 35)]
    with Checkpointer(tmp_path, state, keep=2) as checkpointer:
        assert checkpointer.resume() == 35
        with pytest.warns(UserWarning, match="later checkpoints"):
            assert checkpointer.resume(step=30) == 30
        with pytest.raises(FileNotFoundError):
            checkpointer.resume(step=9)
        checkpointer.save(35)
        checkpointer.save(40)
    assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (35, 40)]
    with warnings.catch_warnings(), Checkpointer(tmp_path, state) as checkpointer:
        warnings.simplefilter("error")
        assert checkpointer.resume() == 40
        checkpointer.save(41)


def test_the_first_save_makes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "typo" / "run"
    with Checkpointer(folder, {"x": 1}) as checkpointer:
        with pytest.warns(UserWarning, match="whether its file system is mounted"):
            assert (checkpointer.resume(), checkpointer.step) == (0, None)
        assert not folder.parent.exists()
        assert checkpointer.latest() is None
        checkpointer.save(0)
        assert checkpointer.step == 0
    with Checkpointer(folder, {"x": 1}) as checkpointer:
        assert (checkpointer.resume(), checkpointer.step) == (0, 0)
        assert checkpointer.latest() == str(folder / "step-00000000.pt")


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        Checkpointer(tmp_path / path, {"x": 1}) as checkpointer,
        pytest.raises(OSError, match=path),
    ):
        checkpointer.save(1)


def test_a_job_of_one_process_needs_no_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Checkpointer(tmp_path, {"x": 1}) as checkpointer:
        assert checkpointer.resume() == 0
