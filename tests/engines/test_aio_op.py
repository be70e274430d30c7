"""What keeps DeepSpeed's op from running here, found without importing or building anything."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fastserial import engines
from fastserial.bench.torch_rows import engine_rows
from fastserial.engines.deepspeed import aio_op
from fastserial.errors import EngineUnavailableError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DeepSpeed and all tools are there, and the op is built."""
    package = tmp_path / "deepspeed"
    package.mkdir()
    spec = importlib.machinery.ModuleSpec("deepspeed", None, origin="x", is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("c++", "ninja"):
        (tools / name).touch(0o755)
    (tmp_path / "extensions" / "async_io").mkdir(parents=True)
    (tmp_path / "extensions" / "async_io" / "async_io.so").touch()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(aio_op, "_loads", lambda library: True)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("bin/c++", "apt-get install g++"),
        ("bin/ninja", "pip install ninja"),
        ("extensions/async_io/async_io.so", aio_op.BUILD_COMMAND),
    ],
)
def test_one_thing(machine: Path, file: str, expected: str) -> None:
    (machine / file).unlink()
    (lack,) = aio_op.missing()
    assert expected in lack


@pytest.mark.parametrize("spec", [None, importlib.machinery.ModuleSpec("deepspeed", None)])
def test_deepspeed(machine: Path, monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    """Not installed, or only a folder of this name: the engine says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(EngineUnavailableError, match="pip install deepspeed"):
        engines.create("deepspeed", 4)
    with pytest.raises(EngineUnavailableError, match="pip install"):
        aio_op.load_op()


def test_the_lock_of_a_killed_build(machine: Path) -> None:
    """torch's loader would wait for as long as the file is there."""
    lock = machine / "extensions" / "async_io" / "lock"
    lock.touch()
    rows, missing = engine_rows({}, ["zip"])  # it may be that of a build that runs
    assert str(lock) in missing["engine deepspeed"]
    assert not any("deepspeed" in row.name for row in rows)
    assert aio_op.missing() == []
    hours_ago = time.time() - 7200
    os.utime(lock, (hours_ago, hours_ago))
    with pytest.raises(EngineUnavailableError, match=f"rm {lock}"):
        engines.load("deepspeed")
    with pytest.raises(EngineUnavailableError, match=f"rm {lock}"):
        aio_op.load_op()


def test_a_build_is_waited_for(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = machine / "extensions" / "async_io" / "lock"
    lock.touch()
    imported: list[bool] = []

    def import_module(name: str) -> Any:
        imported.append(lock.exists())
        raise ImportError

    monkeypatch.setattr(importlib, "import_module", import_module)
    builder = threading.Timer(0.5, lock.unlink)
    builder.start()
    with pytest.raises(EngineUnavailableError, match="does not load"):
        aio_op.load_op()
    builder.join()
    assert imported == [False]


def test_looking_imports_nothing() -> None:
    """`doctor` asks every engine."""
    code = (
        "import sys; from fastserial import engines; engines.survey(); "
        "sys.exit('deepspeed' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
