"""The second tier of a Checkpointer: copies that are whole or not there, and resuming from them."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.damage import flip
from support.forms import FULL
from support.lives import names

import fastserial
from fastserial import Checkpointer
from fastserial.errors import RemoteError
from fastserial.files.remote import RemoteSource

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("obstore")


def file(step: int) -> str:
    return f"step-{step:08d}.pt"


def objects(*steps: int) -> list[str]:
    return sorted(name for step in steps for name in (file(step), file(step) + ".json"))


class Tiers:
    """A run of one tensor, whose value is its step, in a local folder and a remote one."""

    def __init__(self, folder: Path, url: str) -> None:
        self.local = folder / "run"
        self.url = url
        self.weight = torch.zeros(300_000)

    def open(self, **options: Any) -> Checkpointer:
        options = {"keep": 2, "mirror": self.url, "timeout": 2.0, **options}
        return Checkpointer(self.local, {"weight": self.weight}, **options)

    def save(self, *steps: int, **options: Any) -> None:
        with self.open(**options) as checkpointer:
            for step in steps:
                self.weight.fill_(step)
                checkpointer.save(step)

    def resumed(self, **options: Any) -> int:
        self.weight.fill_(-1)
        with self.open(**options) as checkpointer:
            step = checkpointer.resume()
        assert self.weight[0] == (step or -1)
        return step


@pytest.fixture(params=["file", "memory"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Tiers:
    """obstore opens `file` URLs, fsspec `memory` ones."""
    urls = {"file": f"file://{tmp_path}/remote", "memory": f"memory://{tmp_path.name}/remote"}
    return Tiers(tmp_path, urls[request.param])


def remote(tiers: Tiers) -> Any:
    files, root = fsspec.core.url_to_fs(tiers.url)
    return files, root


def there(tiers: Tiers) -> list[str]:
    files, root = remote(tiers)
    found = (os.path.basename(path) for path in files.find(root))
    return sorted(name for name in found if not name.startswith(".fastserial."))


def test_the_copies_are_the_files_and_the_same_rules_keep_them(tiers: Tiers) -> None:
    tiers.save(*range(1, 7), keep_every=3)
    assert names(tiers.local) == [file(step) for step in (3, 5, 6)]
    assert there(tiers) == objects(3, 5, 6)
    files, root = remote(tiers)
    for name in names(tiers.local):
        data = (tiers.local / name).read_bytes()
        assert files.cat_file(f"{root}/{name}") == data
        manifest = json.loads(files.cat_file(f"{root}/{name}.json"))
        assert manifest["nbytes"] == len(data)


def test_resume_takes_the_newest_of_both(tiers: Tiers) -> None:
    tiers.save(1, 2)
    shutil.rmtree(tiers.local)
    assert tiers.resumed() == 2  # all of it is in the mirror
    assert fastserial.verify(tiers.local / file(2)).ok
    (tiers.local / file(2)).unlink()
    tiers.save(1, mirror=None)
    assert tiers.resumed() == 2  # the mirror is newer
    tiers.save(3, mirror=None)
    assert tiers.resumed() == 3  # the local one is
    files, root = remote(tiers)
    files.rm_file(f"{root}/{file(2)}")
    (tiers.local / file(3)).unlink()
    assert tiers.resumed() == 2  # it is here: nothing is downloaded
    with tiers.open() as checkpointer:
        shutil.copy(tiers.local / file(2), tiers.local / "kept")
        (tiers.local / file(2)).unlink()
        assert checkpointer.resume(step=1) == 1


def test_a_damaged_file_is_replaced_by_its_copy(tiers: Tiers) -> None:
    tiers.save(1, 2)
    path = tiers.local / file(2)
    flip(path, path.stat().st_size // 2)
    assert tiers.resumed() == 2
    assert fastserial.verify(path).ok


def test_a_damaged_copy_is_passed_over(tiers: Tiers) -> None:
    tiers.save(1, 2)
    shutil.rmtree(tiers.local)
    files, root = remote(tiers)
    data = bytearray(files.cat_file(f"{root}/{file(2)}"))
    data[len(data) // 2] ^= 1
    files.pipe_file(f"{root}/{file(2)}", bytes(data))
    with pytest.warns(RuntimeWarning, match="copy in the mirror is damaged"):
        assert tiers.resumed() == 1


def test_without_a_manifest_there_is_no_checkpoint(tiers: Tiers) -> None:
    tiers.save(1, 2)
    shutil.rmtree(tiers.local)
    files, root = remote(tiers)
    files.rm_file(f"{root}/{file(2)}.json")
    assert tiers.resumed() == 1
    tiers.save(3)
    assert there(tiers) == sorted([*objects(1, 3), file(2)])  # it could be the user's


def test_a_file_stays_until_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tiers(tmp_path, f"file://{tmp_path}/remote")
    checkpointer = tiers.open(keep=1)
    assert checkpointer._mirror is not None
    folder, may_go_on = checkpointer._mirror._remote, threading.Event()
    put = folder.put

    def held(*arguments: Any) -> None:
        assert may_go_on.wait(60)
        put(*arguments)

    monkeypatch.setattr(folder, "put", held)
    for step in (1, 2):
        tiers.weight.fill_(step)
        checkpointer.save(step)
        checkpointer.wait()
    assert names(tiers.local) == [file(1), file(2)]
    may_go_on.set()
    checkpointer.close()
    assert names(tiers.local) == [file(2)]
    assert there(tiers) == objects(2)


def test_what_a_killed_process_left_is_copied_later(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, f"file://{tmp_path}/remote")
    tiers.save(1, 2, mirror=None)
    tiers.save(3, keep=3)
    assert there(tiers) == objects(1, 2, 3)


def test_what_a_killed_upload_left_is_removed(tiers: Tiers) -> None:
    tiers.save(1, 2)
    files, root = remote(tiers)
    manifest = json.loads(files.cat_file(f"{root}/{file(2)}.json"))
    begun = {key: manifest[key] for key in ("version", "run", "step")}
    files.pipe_file(f"{root}/{file(2)}.json", json.dumps(begun).encode())
    shutil.rmtree(tiers.local)
    assert tiers.resumed() == 1
    tiers.save(3)
    assert there(tiers) == objects(1, 3)


def test_another_runs_checkpoints_are_neither_resumed_nor_removed(
    tiers: Tiers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers.save(998, 999, 1000)
    other = Tiers(tmp_path / "other", tiers.url)
    other.save(1, 2, 1001)
    assert "holds checkpoints of another run" in caplog.text
    assert there(tiers) == sorted(objects(2, 999, 1000, 1001))
    for step in (2, 1001):
        (other.local / file(step)).unlink()
    files, root = remote(tiers)
    files.rm_file(f"{root}/{file(1001)}.json")
    assert other.resumed() == 2  # of its own run
    with other.open() as checkpointer, pytest.raises(FileNotFoundError):
        checkpointer.resume(step=1000)
    caplog.clear()
    (tmp_path / "machine").mkdir()
    machine = Tiers(tmp_path / "machine", tiers.url)
    assert machine.resumed() == 2  # of the run that used the mirror last
    assert "a new run needs a mirror of its own" in caplog.text
    (tiers.local / file(1000)).unlink()
    assert tiers.resumed() == 1000


def test_a_run_without_a_whole_copy_does_not_take_the_mirror(
    tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.save(1, 2)
    other = Tiers(tmp_path / "other", tiers.url)
    checkpointer = other.open()
    assert checkpointer._mirror is not None
    put = checkpointer._mirror._remote.put

    def ends_early(name: str, *more: Any) -> None:
        if name == file(7):
            raise RuntimeError("as if it was killed")
        put(name, *more)

    monkeypatch.setattr(checkpointer._mirror._remote, "put", ends_early)
    with pytest.raises(RuntimeError, match="killed"), checkpointer:
        checkpointer.save(7)
    shutil.rmtree(tiers.local)
    (tmp_path / "machine").mkdir()
    assert Tiers(tmp_path / "machine", tiers.url).resumed() == 2


def test_a_bucket_that_refuses_deletes_has_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = Tiers(tmp_path, f"file://{tmp_path}/remote")
    checkpointer = tiers.open()
    assert checkpointer._mirror is not None
    folder, written = checkpointer._mirror._remote, []
    put = folder.put

    def counted(name: str, *more: Any) -> None:
        written.append(name)
        put(name, *more)

    def refused(names: Any) -> None:
        if list(names):
            raise RemoteError("AccessDenied")

    monkeypatch.setattr(folder, "put", counted)
    monkeypatch.setattr(folder, "remove", refused)
    with checkpointer:
        for step in (1, 2, 3, 3):
            checkpointer.save(step)
            checkpointer.wait()
            checkpointer._mirror.close()
    assert [name for name in written if name.endswith(".pt")] == list(map(file, (1, 2, 3, 3)))
    assert names(tiers.local) == [file(2), file(3)]
    assert there(tiers) == objects(1, 2, 3)
    assert "old checkpoints stay in" in caplog.text


def test_parts_of_a_file_are_downloaded_at_the_same_time(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.weight = torch.zeros(6_000_000)
    tiers.save(1)
    shutil.rmtree(tiers.local)
    at_once = [0]
    read_to = RemoteSource.read_to

    def counted(self: RemoteSource, view: memoryview, *more: Any) -> None:
        at_once[0] += 1
        at_once.append(at_once[0])
        time.sleep(0.1)
        read_to(self, view, *more)
        at_once[0] -= 1

    monkeypatch.setattr(RemoteSource, "read_to", counted)
    assert tiers.resumed() == 1
    assert max(at_once) > 1


def test_a_mirror_that_fails_costs_no_checkpoint(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, f"file://{tmp_path}/blocked/remote")

    def open_and_block() -> Checkpointer:
        (tmp_path / "blocked").unlink(missing_ok=True)
        checkpointer = tiers.open(keep=1)
        shutil.rmtree(tmp_path / "blocked")
        (tmp_path / "blocked").write_bytes(b"")  # a file where the folder was
        return checkpointer

    checkpointer = open_and_block()
    for step in (1, 2, 3):
        tiers.weight.fill_(step)
        checkpointer.save(step)
    with pytest.raises(RemoteError, match="blocked"):
        checkpointer.close()
    assert names(tiers.local)[-1] == file(3)
    with (
        pytest.warns(RuntimeWarning, match="mirror is not used"),
        open_and_block() as checkpointer,
    ):
        assert checkpointer.resume() == 3
    shutil.rmtree(tiers.local)
    with open_and_block() as checkpointer, pytest.raises(RemoteError, match="blocked"):
        checkpointer.resume()  # it does not begin anew


def test_all_ranks_resume_from_what_one_downloads(tmp_path: Path) -> None:
    """Also if a download takes longer than the time after which a rank counts as lost."""
    url = f"file://{tmp_path}/remote"
    for out in ranks.run("ranks_mirror", 2, tmp_path / "run", url):
        assert out.splitlines() == ["4 [4.0]", "3 [3.0]", "3 [3.0]"]


def test_what_opens_no_url(tmp_path: Path) -> None:
    for url in ("nowhere://bucket/run", "s3:///"):
        with pytest.raises(fastserial.ConfigError, match="cannot be opened"):
            Checkpointer(tmp_path, {"x": 1}, mirror=url)


def _kill_at_random(dice: random.Random, folder: Path, url: str, spoiled: bool) -> int:
    """Start a run, kill it, and return the step that it last said is in the mirror."""
    job = ranks.Job("mirrored", 1, folder, url, int(spoiled))
    until = time.monotonic() + 60
    while "\n" not in job.out(0):
        assert time.monotonic() < until, "it does not start"
        time.sleep(0.005)
    time.sleep(dice.random() * 0.5)
    job.kill(0)
    (ended,) = job.wait()
    start, *lines = ended.out.splitlines(keepends=True)
    assert start.startswith("start")
    whole = [line for line in lines if line[-1] == "\n"]
    return int(whole[-1]) if whole else 0


@pytest.mark.trials(3, 100)
@pytest.mark.timeout(3600)
def test_kills(tmp_path: Path, dice: random.Random, trials: int) -> None:
    url = f"file://{tmp_path}/remote"
    mirrored = hits = 0
    for trial in range(trials):
        mirrored = max(mirrored, _kill_at_random(dice, tmp_path / f"run{trial}", url, False))
        present = names(tmp_path / "remote")
        local = names(tmp_path / f"run{trial}")
        hits += f"{local[-1]}.json" not in present if local else 0
        machine = tmp_path / f"machine{trial}"
        machine.mkdir()
        found = Tiers(machine, url)  # what another machine finds
        step = found.resumed()
        assert step >= mirrored
    assert not FULL or hits
    print(f"{trials} kills, {hits} during an upload; {mirrored} checkpoints")


def test_kills_are_seen_where_the_manifest_comes_first(tmp_path: Path, dice: random.Random) -> None:
    """The control."""
    url = f"file://{tmp_path}/remote"
    for trial in range(20):
        _kill_at_random(dice, tmp_path / f"run{trial}", url, True)
        present = names(tmp_path / "remote")
        if any(name.removesuffix(".json") not in present for name in present):
            return
        for name in present:
            if name.endswith(".json"):
                manifest = json.loads((tmp_path / "remote" / name).read_text())
                if manifest["nbytes"] != (tmp_path / "remote" / name[:-5]).stat().st_size:
                    return
    raise AssertionError("no kill left a manifest without its file")
