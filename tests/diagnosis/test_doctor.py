"""`fastserial doctor`: the facts, what they mean, and that it changes nothing."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastserial
from fastserial.cli.doctor import show
from fastserial.config import Config
from fastserial.diagnosis import examine as examine_module
from fastserial.diagnosis import folder as folder_module
from fastserial.diagnosis.examine import Boot, Diagnosis, Finding, Torch, examine, judge
from fastserial.diagnosis.folder import FolderFacts, probe_folder
from fastserial.engines import EngineStatus
from fastserial.errors import FastserialError
from fastserial.files import linux
from fastserial.files.linux import DirectAlignment
from fastserial.memory import huge_pages

ROOT = Path(fastserial.__file__).resolve().parent.parent
OLD = (1_000_000_000, 1_000_000_000)


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
    patched = Torch("2.13.0", "v2.13", True, ("torch.serialization._save",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examine_module, "_torch", lambda: patched)
        patch.setattr(examine_module, "_boot", lambda: Boot(None, None, True))
        patch.setattr(examine_module.config, "unknown_variables", list)
        return dataclasses.replace(examine(), folder=folder, small_pages=None, findings=())


def texts(found: Diagnosis, **options: Any) -> list[Finding]:
    return list(judge(found, Config(**options)))


def only(found: Diagnosis, **options: Any) -> Finding:
    (finding,) = texts(found, **options)
    assert finding.remedy
    return finding


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "fastserial", "doctor", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


# --- the command ------------------------------------------------------------------------------


def test_json(tmp_path: Path) -> None:
    done = command(str(tmp_path), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["fast"] else 1), done.stderr
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


def test_folder_missing(tmp_path: Path) -> None:
    done = command(str(tmp_path / "missing"))
    assert done.returncode == 2
    assert "is not a directory" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(FastserialError, match="not a directory"):
        examine(Path(__file__))


def test_options_from_the_environment() -> None:
    done = command("--json", FASTSERIAL_BLOCK_SIZE="1MiB", FASTSERIAL_BLOKSIZE="1")
    found = json.loads(done.stdout)
    options = {option["name"]: option for option in found["options"]}
    assert options["block_size"] == {
        "name": "block_size",
        "value": 1 << 20,
        "source": "FASTSERIAL_BLOCK_SIZE",
    }
    assert found["unknown_variables"] == ["FASTSERIAL_BLOKSIZE"]
    assert done.returncode == 0


def with_torch(prepare: str) -> subprocess.CompletedProcess[str]:
    """Run the command after these lines of Python."""
    program = f"{prepare}\nfrom fastserial.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "doctor"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_torch_that_does_not_fit() -> None:
    done = with_torch("import torch.serialization as s; s._save = lambda *a, **k: None")
    assert done.returncode == 1
    assert "stay stock" in done.stdout
    assert "fastserial patches" in done.stdout


def test_torch_missing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')\n")
    done = with_torch(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    assert done.returncode == 1, done.stderr
    assert "no torch today" in done.stdout
    assert "pip install torch" in done.stdout


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


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """No huge pages for this process."""
    prctl = ctypes.CDLL(None).prctl
    before = prctl(huge_pages.PR_GET_THP_DISABLE, 0, 0, 0, 0)
    assert prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
    try:
        yield
    finally:
        prctl(41, before, 0, 0, 0)


def test_huge_pages_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with small_pages():
        assert "PR_SET_THP_DISABLE" in str(examine().small_pages)
    switch = tmp_path / "enabled"
    monkeypatch.setattr(huge_pages, "SWITCH", switch)
    assert "no transparent huge pages" in str(examine().small_pages)
    for setting, refused in [
        ("[always] madvise never", False),
        ("always [madvise] never", False),
        ("always madvise [never]", True),
    ]:
        switch.write_text(setting + "\n")
        assert (examine().small_pages is not None) is refused


# --- the folder -------------------------------------------------------------------------------


def test_probe_finds_a_folder_that_takes_no_file() -> None:
    found = probe_folder(Path("/proc"))
    assert found.problem


def test_leftovers(tmp_path: Path) -> None:
    names = [f".model.pt.fastserial-{slot}.tmp" for slot in (0, 1, 12)]
    others = [
        "model.pt",
        ".model.pt.fastserial-.tmp",
        "x.fastserial-0.tmp",
        ".young.fastserial-0.tmp",
    ]
    for name in [*names, *others]:
        (tmp_path / name).write_bytes(b"")
        if "young" not in name:
            os.utime(tmp_path / name, OLD)
    (tmp_path / ".folder.fastserial-0.tmp").mkdir()
    (tmp_path / ".link.fastserial-0.tmp").symlink_to(tmp_path / names[0])
    with (tmp_path / names[1]).open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert folder_module.leftovers(tmp_path) == (names[0], names[2])
    assert set(folder_module.leftovers(tmp_path)) == set(names)
    assert all((tmp_path / name).exists() for name in names)


def test_direct_io_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(linux, "reopen", refuse)
    assert probe_folder(tmp_path).direct_problem == "Invalid argument"


# --- the findings -----------------------------------------------------------------------------


def test_nothing_to_find(healthy: Diagnosis) -> None:
    assert texts(healthy) == []
    assert healthy.fast


@pytest.mark.parametrize(
    ("folder", "word", "slow"),
    [
        ({"problem": "Read-only file system"}, "Read-only", "fails"),
        ({"direct_problem": "Invalid argument"}, "page cache", True),
        ({"alignment": None}, "page cache", True),
        ({"alignment": DirectAlignment(4, 1 << 23, True)}, "block_size", True),
        ({"file_system": "tmpfs", "alignment": None}, "memory", False),
        ({"file_system": "devtmpfs"}, "memory", False),
        ({"leftovers": (".a.fastserial-0.tmp",)}, ".a.fastserial-0.tmp", False),
        ({"free_bytes": 1000}, "free", False),
    ],
)
def test_folder_findings(healthy: Diagnosis, folder: dict[str, Any], word: str, slow: Any) -> None:
    assert healthy.folder is not None
    changed = dataclasses.replace(healthy.folder, **folder)
    finding = only(dataclasses.replace(healthy, folder=changed))
    assert word in finding.text
    assert (finding.slow, finding.fails) == (bool(slow), slow == "fails")


@pytest.mark.parametrize(
    ("state", "word", "slow"),
    [
        ({"torch": Torch(None, reason="torch cannot be imported: x")}, "imported", True),
        ({"torch": Torch("9.9", reason="no patch")}, "no patch", True),
        ({"torch": Torch("2.13.1", "v2.13", False)}, "2.13.1", False),
        ({"torch": Torch("2.13.0", "v2.13", True, ("a", "b"), ("b",))}, "replaced b", True),
        ({"engine": "warp"}, "warp", "fails"),
        ({"engine": "x", "engines": (EngineStatus("x", "no libx"),)}, "no libx", "fails"),
        ({"options_problem": "FASTSERIAL_DIRECT: what?"}, "FASTSERIAL_DIRECT", "fails"),
        ({"unknown_variables": ("FASTSERIAL_X",)}, "FASTSERIAL_X", False),
        ({"small_pages": "the kernel says never"}, "huge pages", True),
        ({"boot": Boot("0", False, True)}, "off", True),
        ({"boot": Boot("1", True, False)}, "no effect", True),
        ({"boot": Boot("maybe", None, True)}, "neither", True),
        ({"boot": Boot("1", True, True)}, None, False),
    ],
)
def test_findings(
    healthy: Diagnosis,
    state: dict[str, Any],
    word: str | None,
    slow: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
