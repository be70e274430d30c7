"""Temporary names, and what killed processes leave under them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.identity import fast
from support.others import in_child

from fastserial.files import destination, linux, temporary
from fastserial.files.temporary import Owner, owner_of, temporary_name, this_process
from fastserial.saving.writer import FastFileWriter

OLD = time.time() - 86500  # more than a day ago
NFS = 0x6969


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each save look for leftovers."""
    monkeypatch.setattr(temporary, "_PAUSE", 0)


@pytest.fixture(params=["ext4", "nfs"])
def one_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether locks can be relied on in the folder."""
    magic = 0xEF53 if request.param == "ext4" else NFS
    monkeypatch.setattr(linux, "magic_of", lambda file: magic)
    return bool(request.param == "ext4")


def save(folder: Path) -> list[str]:
    """Save, and return what is left beside the file."""
    with FastFileWriter(folder / "x.pt") as file:
        file.write(b"new")
    assert (folder / "x.pt").read_bytes() == b"new"
    return sorted(set(os.listdir(folder)) - {"x.pt"})


def plant(folder: Path, owner: Owner, base: str = "x.pt", written: float | None = None) -> str:
    """Make a file as another process would have named it."""
    own = temporary_name(base)
    name = own.replace("-".join(map(str, this_process())), "-".join(map(str, owner)))
    assert owner_of(name) == owner
    (folder / name).write_bytes(b"left")
    if written is not None:
        os.utime(folder / name, (written, written))
    return name


@pytest.fixture
def gone() -> Owner:
    """A process of ours that was killed."""
    process, started = in_child(lambda: [os.getpid(), this_process().started])
    return this_process()._replace(process=process, started=started)


@pytest.fixture
def alive() -> Iterator[Owner]:
    with subprocess.Popen(["sleep", "60"]) as process:
        started = temporary._Status(process.pid).started
        yield this_process()._replace(process=process.pid, started=started)
        process.kill()


ANOTHER_BOOT, ANOTHER_SPACE = {"boot": "f" * 12, "space": "e" * 8}, {"space": "e" * 8}


# -- names ---------------------------------------------------------------------------------------


def test_names_are_random_and_say_whose_they_are() -> None:
    names = {temporary_name("x.pt") for _ in range(1000)}
    assert len(names) == 1000
    assert {owner_of(name) for name in names} == {this_process()}
    other = in_child(lambda: temporary_name("x.pt"))
    assert owner_of(other) not in (None, this_process())


@pytest.mark.parametrize(
    "base", ["x.pt", "", "\n", "a.fastserial-b.tmp", "ä" * 127, "𝄞" * 63, "x" * 255]
)
def test_names_fit_and_are_cut_between_characters(base: str, tmp_path: Path) -> None:
    for cut in range(4):
        name = temporary_name(("x" * cut + base)[:255])
        assert len(os.fsencode(name)) <= 143  # eCryptfs
        assert os.fsencode(name).decode()  # UTF-8, which some file systems insist on
        assert owner_of(name) == this_process()
        (tmp_path / name).touch()


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    name = temporary_name(os.fsdecode(b"\xff" * 200))
    (tmp_path / name).touch()
    assert owner_of(name) == this_process()


# -- leftovers -----------------------------------------------------------------------------------


def test_of_a_killed_process(tmp_path: Path, named: bool, one_host: bool, gone: Owner) -> None:
    """Of any target, and of the trial of a file system; however many."""
    for base in ("x.pt", "y.pt", "trial", *map(str, range(20))):
        plant(tmp_path, gone, base)
    assert save(tmp_path) == []


def test_of_a_killed_process_whose_lock_is_kept(
    tmp_path: Path, one_host: bool, gone: Owner
) -> None:
    """By a child that inherited it, on one host; by a server that did not hear of the unlock."""
    young, old = plant(tmp_path, gone), plant(tmp_path, gone, written=OLD)
    with (tmp_path / young).open("r+b") as one, (tmp_path / old).open("r+b") as two:
        for file in (one, two):
            fcntl.flock(file, fcntl.LOCK_EX)
        assert save(tmp_path) == sorted([young, old] if one_host else [young])


def test_of_a_live_process(tmp_path: Path, named: bool, one_host: bool, alive: Owner) -> None:
    """Without a lock, however old; and of another user."""
    mine, init = plant(tmp_path, alive, written=OLD), this_process()._replace(process=1)
    first = plant(tmp_path, init._replace(started=temporary._Status(1).started), written=OLD)
    assert save(tmp_path) == sorted((mine, first))


def test_of_a_process_whose_number_is_used_again(
    tmp_path: Path, one_host: bool, alive: Owner
) -> None:
    plant(tmp_path, alive._replace(started=alive.started - 1))
    assert save(tmp_path) == []


def test_of_a_zombie(tmp_path: Path, one_host: bool) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        started = temporary._Status(process.pid).started
        name = plant(tmp_path, this_process()._replace(process=process.pid, started=started))
        assert save(tmp_path) == [name]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert save(tmp_path) == []


def test_of_this_process(tmp_path: Path, named: bool, one_host: bool) -> None:
    """What could not be removed when its save failed goes; what is being written stays."""
    plant(tmp_path, this_process())
    live = tmp_path / plant(tmp_path, this_process())
    with live.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert save(tmp_path) == [live.name]
    assert save(tmp_path) == []


@pytest.mark.parametrize("changes", [ANOTHER_SPACE, ANOTHER_BOOT], ids=["container", "boot"])
def test_of_others(tmp_path: Path, one_host: bool, gone: Owner, changes: dict[str, str]) -> None:
    """On one host's disk the lock tells, elsewhere the time does."""
    other = gone._replace(**changes)
    booted = temporary._booted()
    old, young = plant(tmp_path, other, written=OLD), plant(tmp_path, other)
    before = plant(tmp_path, other, written=booted - 60)
    locked = tmp_path / plant(tmp_path, other, written=min(OLD, booted - 60))
    with locked.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        stay = {locked.name}
        if not (one_host and changes is ANOTHER_SPACE):
            stay.add(young)
        if not one_host and booted - 60 > OLD:
            stay.add(before)
        assert save(tmp_path) == sorted(stay), old


def test_a_clock_that_is_ahead(
    tmp_path: Path, gone: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the file system counts as well, which is the server's."""
    monkeypatch.setattr(linux, "magic_of", lambda file: NFS)
    name = plant(tmp_path, gone._replace(**ANOTHER_BOOT))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 10 * 86400)
    assert save(tmp_path) == [name]


@pytest.mark.parametrize("missing", ["/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"])
def test_without_proc(
    tmp_path: Path, gone: Owner, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is taken for a process of ours."""
    name = plant(tmp_path, gone)
    monkeypatch.setattr("builtins.open", _refusing(open, missing))
    monkeypatch.setattr(os, "readlink", _refusing(os.readlink, missing))
    monkeypatch.setattr(linux, "magic_of", lambda file: NFS)
    this_process.cache_clear()
    try:
        assert save(tmp_path) == [name]
        assert owner_of(temporary_name("x")) == Owner("0" * 12, "0" * 8, os.getpid(), 0)
    finally:
        monkeypatch.undo()
        this_process.cache_clear()


def _refusing(real: Callable[..., object], missing: str) -> Callable[..., object]:
    def call(path: object, *args: object, **keywords: object) -> object:
        if path == missing:
            raise FileNotFoundError(missing)
        return real(path, *args, **keywords)

    return call


def test_hidden_processes(
    tmp_path: Path, one_host: bool, alive: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `hidepid`, and where /proc is that of the namespace around ours."""
    name = plant(tmp_path, alive, written=OLD)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", _refusing(open, f"/proc/{alive.process}/stat"))
        assert save(tmp_path) == [name]
    other = plant(tmp_path, alive._replace(started=1), written=OLD)
    monkeypatch.setattr(temporary, "_proc_is_ours", lambda: False)
    assert save(tmp_path) == sorted((name, other))


def test_what_only_looks_like_one(tmp_path: Path, named: bool, gone: Owner) -> None:
    names = [plant(tmp_path, gone) for _ in range(3)]
    for name in names:
        (tmp_path / name).unlink()
    (tmp_path / names[0]).mkdir()
    os.mkfifo(tmp_path / names[1])
    (tmp_path / names[2]).symlink_to(tmp_path / "x.pt")
    others = [".x.pt.fastserial-0.tmp", ".fastserial-.tmp", f"{names[0]}~", "x.fastserial-x"]
    for name in others:
        (tmp_path / name).touch()
    assert save(tmp_path) == sorted(names + others)


@pytest.mark.slow
def test_many_files_in_the_way(tmp_path: Path, named: bool, gone: Owner) -> None:
    """Nobody can stop a save by names that they take first."""
    for number in range(10_000):
        (tmp_path / f".x.pt.fastserial-{number}.tmp").touch()
    foreign = [plant(tmp_path, gone._replace(**ANOTHER_BOOT)) for _ in range(1000)]
    with fast():
        torch.save({"x": 1}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == {"x": 1}
    assert len(os.listdir(tmp_path)) == 11_001, foreign[0]


def test_the_server_is_asked_once_for_its_time(
    tmp_path: Path, gone: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many old files others have left there."""
    monkeypatch.setattr(linux, "magic_of", lambda file: NFS)
    asked = []
    real = temporary._now_there
    monkeypatch.setattr(temporary, "_now_there", lambda fd: asked.append(fd) or real(fd))
    for _ in range(5):
        plant(tmp_path, gone._replace(**ANOTHER_BOOT), written=OLD)
    assert save(tmp_path) == []
    assert len(asked) == 1


def test_a_large_folder_is_not_searched_at_each_save(
    tmp_path: Path, gone: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search takes 1 % of the time at most."""
    monkeypatch.undo()
    searched = []
    real = temporary.leftovers
    monkeypatch.setattr(
        temporary, "leftovers", lambda fd: searched.append(time.sleep(0.02)) or real(fd)
    )
    for _ in range(5):
        save(tmp_path)
    assert len(searched) == 1
    plant(tmp_path, gone)
    later = time.perf_counter() + 60
    monkeypatch.setattr(time, "perf_counter", lambda: later)
    assert save(tmp_path) == []


def test_a_user_who_may_not_remove_it(tmp_path: Path, gone: Owner) -> None:
    """No error; a file that they cannot open goes if its owner is gone."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    tmp_path.chmod(0o1777)
    name = plant(tmp_path, gone)
    (tmp_path / name).chmod(0)

    def there() -> list[str]:
        fd = os.open(tmp_path, os.O_RDONLY)
        os.setgroups([])
        os.setgid(1234)
        os.setuid(1234)
        temporary.sweep(fd)
        return os.listdir(fd)

    assert in_child(there) == [name]
    tmp_path.chmod(0o777)
    assert in_child(there) == []


def test_names_in_use_are_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "_can_link", lambda: False)
    with FastFileWriter(tmp_path / "x.pt") as file:
        (name,) = os.listdir(tmp_path)
        with (tmp_path / name).open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        file.write(b"new")
