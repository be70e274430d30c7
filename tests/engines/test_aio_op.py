"""What keeps DeepSpeed's op from running here, found without importing or building anything."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
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


def test_no_row_while_the_op_is_locked(machine: Path) -> None:
    """The lock of a build that was killed stays, and torch's loader would wait for ever."""
    lock = machine / "extensions" / "async_io" / "lock"
    lock.touch()
    rows, missing = engine_rows({}, ["zip"])
    assert str(lock) in missing["engine deepspeed"]
    assert not any("deepspeed" in row.name for row in rows)
    assert aio_op.missing() == []


def test_looking_imports_nothing() -> None:
    """`doctor` asks every engine."""
    code = (
        "import sys; from fastserial import engines; engines.survey(); "
        "sys.exit('deepspeed' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
