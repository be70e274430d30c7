"""`fastserial doctor`: the facts, what they mean, and that it changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import Ended, python

import fastserial
from fastserial.cli.doctor import show
from fastserial.config import Config
from fastserial.diagnosis import examine as examine_module
from fastserial.diagnosis.examine import Boot, Diagnosis, Finding, Torch, examine, judge
from fastserial.diagnosis.folder import FolderFacts, probe_folder
from fastserial.engines import EngineStatus
from fastserial.errors import REMEDIES, FastserialError
from fastserial.files import linux
from fastserial.files.linux import DirectAlignment
from fastserial.memory import huge_pages


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("FASTSERIAL")]:
        monkeypatch.delenv(name)
    yield
    fastserial.uninstall()


@pytest.fixture(scope="module")
def healthy() -> Diagnosis:
    """A machine and a folder without a fault."""
    folder = FolderFacts("/data", None, "ext4", "sda", 1 << 40, DirectAlignment(4, 512, True))
    well: dict[str, Any] = {"small_pages": None, "address_space_bytes": None, "findings": ()}
    patched = Torch("2.13.0", "v2.13", True, ("torch.serialization._save",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examine_module, "_torch", lambda: patched)
        patch.setattr(examine_module, "_boot", lambda: Boot(None, None, True))
        patch.setattr(examine_module.config, "unknown_variables", list)
        return dataclasses.replace(examine(), folder=folder, **well)


def texts(found: Diagnosis, **options: Any) -> list[Finding]:
    return list(judge(found, Config(**options)))


def only(found: Diagnosis, **options: Any) -> Finding:
    (finding,) = texts(found, **options)
    assert finding.remedy
    return finding


def command(*words: str) -> Ended:
    return python("-m", "fastserial", "doctor", *words, code=None)


# --- the command ------------------------------------------------------------------------------


def test_json(tmp_path: Path) -> None:
    done = command(str(tmp_path), "--json")
    found = json.loads(done.out)
    assert done.code == (0 if found["fast"] else 1), done.err
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["patch"]
    assert found["torch"]["self_check"] is None
    assert found["engine"] == "threads"
    assert {"threads", "deepspeed"} <= {engine["name"] for engine in found["engines"]}
    assert {option["source"] for option in found["options"]} == {"default"}
    assert found["folder"]["path"] == str(tmp_path)
    assert found["folder"]["free_bytes"] > 0
    assert found["folder"]["file_system"] == linux.kind_of(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "refused", lambda: None)
    found = examine()
    assert found.folder is None
    assert found.fast


def test_limited_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, resource.RLIM_INFINITY))
    found = examine()
    assert found.address_space_bytes == 1 << 40
    assert any("ulimit -v" in finding.remedy for finding in found.findings)
    assert not found.fast


def test_folder_missing(tmp_path: Path) -> None:
    done = command(str(tmp_path / "missing"))
    assert done.code == 2
    assert "is not a directory" in done.err
    assert "Traceback" not in done.err
    with pytest.raises(FastserialError, match="not a directory"):
        examine(Path(__file__))


def test_torch_that_does_not_fit() -> None:
    prepare = "import torch.serialization as s; s._save = lambda *a, **k: None"
    program = f"{prepare}\nfrom fastserial.cli.main import main; main()"
    done = python("-c", program, "doctor", code=None)
    assert done.code == 1
    assert "stay stock" in done.out
    assert "fastserial patches" in done.out


# --- in this process --------------------------------------------------------------------------


def test_leaves_torch_as_it_was() -> None:
    save = torch.serialization._save
    assert examine().torch.patch
    assert torch.serialization._save is save
    fastserial.install(threads=3)
    patched = torch.serialization._save
    found = examine()
    assert torch.serialization._save is patched
    assert next(o for o in found.options if o.name == "threads").source == "install()"
    with fastserial.options(threads=2):
        option = next(o for o in examine().options if o.name == "threads")
    assert (option.value, option.source) == (2, "options()")


# --- the folder -------------------------------------------------------------------------------


def test_probe_finds_a_folder_that_takes_no_file() -> None:
    found = probe_folder(Path("/proc"))
    assert found.problem


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB, with few inodes."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=4M,nr_inodes=20"]
    subprocess.run(["mount", *options, "none", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_folder_in_which_nothing_can_be_saved(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No save is tried in it: what can be created there may still have no room."""

    def failures() -> list[Finding]:
        found = examine(disk)
        show(found)
        assert "All is well" not in capsys.readouterr().out
        return [finding for finding in found.findings if finding.fails]

    assert not failures()  # little room is a note
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    (finding,) = failures()
    assert "No space left" in finding.text
    assert "Free space" in finding.remedy
    (disk / "filler").unlink()
    for number in range(20):
        with contextlib.suppress(OSError):
            (disk / str(number)).touch()
    (finding,) = failures()
    assert "inodes" in finding.text
    (disk / "0").unlink()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    (finding,) = failures()
    assert "Read-only" in finding.text
    assert "Remount" in finding.remedy


@pytest.mark.parametrize("error", [errno.EDQUOT, errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_trial_write_that_fails(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(linux, "synced", refuse)
    found = probe_folder(tmp_path)
    assert (found.problem, found.remedy) == (os.strerror(error), REMEDIES[error])


# --- the findings -----------------------------------------------------------------------------


def test_nothing_to_find(healthy: Diagnosis) -> None:
    assert texts(healthy) == []
    assert healthy.fast


@pytest.mark.parametrize(
    ("state", "word", "slow"),
    [
        ({"torch": Torch(None, reason="torch cannot be imported: x")}, "imported", True),
        ({"torch": Torch("9.9", reason="no patch")}, "no patch", True),
        ({"torch": Torch("2.13.1", "v2.13", False)}, "2.13.1", False),
        ({"torch": Torch("2.13.0", "v2.13", True, ("a", "b"), ("b",))}, "replaced b", True),
        ({"engine": "warp"}, "warp", "fails"),
        ({"engine": "x", "engines": (EngineStatus("x", "no libx"),)}, "no libx", "fails"),
        ({"refused_variables": ("FASTSERIAL_DIRECT: what?",)}, "FASTSERIAL_DIRECT", True),
        ({"unknown_variables": ("FASTSERIAL_X",)}, "FASTSERIAL_X", False),
        ({"small_pages": "the kernel says never"}, "huge pages", True),
        ({"address_space_bytes": 1 << 33}, "address space", True),
        ({"boot": Boot("0", False, True)}, "off", True),
        ({"boot": Boot("1", True, False)}, "no effect", True),
        ({"boot": Boot("maybe", None, True)}, "neither", True),
        ({"boot": Boot("1", True, True)}, None, False),
        ({"folder": {"problem": "Read-only file system"}}, "Read-only", "fails"),
        ({"folder": {"free_bytes": 0}}, "kept for root", "fails"),
        ({"folder": {"free_bytes": 5000}}, "only 4.9KiB", False),
        ({"folder": {"free_bytes": None}}, None, False),
        ({"folder": {"direct_problem": "Invalid argument"}}, "page cache", True),
        ({"folder": {"alignment": None}}, "page cache", True),
        ({"folder": {"alignment": DirectAlignment(4, 1 << 23, True)}}, "block_size", True),
        ({"folder": {"file_system": "tmpfs", "alignment": None}}, "memory", False),
        ({"folder": {"file_system": "devtmpfs"}}, "memory", False),
        ({"folder": {"leftovers": (".a.fastserial-0.tmp",)}}, ".a.fastserial-0.tmp", False),
    ],
)
def test_findings(
    healthy: Diagnosis,
    state: dict[str, Any],
    word: str | None,
    slow: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "folder" in state:
        assert healthy.folder is not None
        state = {"folder": dataclasses.replace(healthy.folder, **state["folder"])}
    changed = dataclasses.replace(healthy, **state)
    if word is None:
        assert texts(changed) == []
        return
    finding = only(changed)
    assert word in finding.text
    assert (finding.slow, finding.fails) == (bool(slow), slow == "fails")
    diagnosis = dataclasses.replace(changed, findings=(finding,))
    assert diagnosis.fast is not bool(slow)
    show(diagnosis)
    mark = "fails" if slow == "fails" else "slow" if slow else "note"
    assert f"\n{mark}  " in capsys.readouterr().out
