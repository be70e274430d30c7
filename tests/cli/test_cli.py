"""The command line: what it starts, what it says, how it ends."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.processes import Ended, python
from typer.testing import CliRunner

import fastserial
from fastserial.bench.measure import BenchError
from fastserial.cli import run
from fastserial.cli.main import app
from fastserial.errors import ConfigError

SAVE = ["bench", "save", "--size", "2MiB", "--tensors", "9", "--runs", "1", "--no-fio"]


def command(*words: object) -> Ended:
    return python("-m", "fastserial", *words, code=None)


def test_version() -> None:
    done = command("--version")
    assert (done.code, done.out) == (0, f"fastserial {fastserial.__version__}\n")


@pytest.mark.parametrize("words", [["--help"], ["verify", "a.pt"], ["inspect", "a.pt"]])
def test_commands_that_do_not_import_torch(words: list[str], tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(10)}, tmp_path / "a.pt")
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from fastserial.cli.main import app\n"
        f"done = CliRunner().invoke(app, {words})\n"
        "sys.exit(done.exit_code or 'torch' in sys.modules)\n"
    )
    python("-c", program, cwd=tmp_path)


def test_type_checkers_use_our_types() -> None:
    """They see the names that there are: what is imported for them, and what is imported later."""
    source = Path(fastserial.__file__)
    assert source.with_name("py.typed").is_file()
    block = next(node for node in ast.parse(source.read_text()).body if isinstance(node, ast.If))
    seen = {"__version__"}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            seen |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign):
            seen |= {name.id for name in node.targets if isinstance(name, ast.Name)}
    assert seen - {"distributed"} == set(fastserial.__all__)
    assert all(hasattr(fastserial, name) for name in fastserial.__all__)


# --- run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["script.py"],
        ["script.py", "--version", "-x", "--help", "--", "-y"],
        ["-m", "module", "--json", "a b"],
        ["-c", "import this", "--flag=1"],
        ["-X", "importtime", "-mmodule"],
    ],
)
def test_run_hands_all_words_on(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(run, "run", seen.append)
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code == 0, done.output
    assert seen == [words]


@pytest.mark.parametrize(
    "words", [["torchrun", "--standalone"], ["sh", "-c", 'exec python "$@"', "x"]]
)
def test_run_a_command_that_starts_the_program(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun is found, and its ranks have fastserial; so has what a shell starts."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nfrom fastserial.patching.install import patched\n"
        "open(sys.argv[1], 'w').write(str(patched('_save') is not None))\n"
    )
    torchrun = tmp_path / "torchrun"  # as pip makes it
    torchrun.write_text(f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = command("run", *words, str(script), str(tmp_path / "said"))
    assert done.code == 0, done.err
    assert (tmp_path / "said").read_text() == "True"


PYTHON_FILE = "import sys; sys.stdout.write(sys.argv[1])\n"


@pytest.mark.parametrize(
    ("name", "text", "executable"),
    [
        ("./launch.sh", "#!/bin/sh\nprintf %s $1\n", True),
        ("launch", "#!/bin/sh\nprintf %s $1\n", True),
        ("./launch.sh", "printf %s $1\n", True),  # shells run it, too
        ("./train.py", PYTHON_FILE, True),
        ("train.py", PYTHON_FILE, False),
        ("./train", PYTHON_FILE, False),
        ("./train", f"#!/usr/bin/env python3\n{PYTHON_FILE}", True),
    ],
)
def test_run_a_file(name: str, text: str, executable: bool, tmp_path: Path) -> None:
    """Python runs its programs, and the system runs the others."""
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o755 if executable else 0o644)
    (tmp_path / "printf").mkdir()  # a folder is no program
    for words in ([name], ["printf", "%s"]):
        done = python("-m", "fastserial", "run", *words, "said", cwd=tmp_path)
        assert done.out == "said"


def test_run_what_may_not_be_run(tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    path.write_text("#!/bin/sh\n")
    done = command("run", path)
    assert done.code == 2
    assert done.err == f"error: [Errno 13] Permission denied: '{path}'\n"


# --- bench and demo ---------------------------------------------------------------------------


def test_bench_save(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["--no-engines", "--format", "zip", "--folder", folder, "--json", target]
    done = command(*SAVE, *words)
    assert done.code == 0, done.err
    assert list(folder.iterdir()) == []
    found = json.loads(target.read_text())
    rows = {row["name"]: row for row in found["tables"][0]["rows"]}
    fast = [row for name, row in rows.items() if name.startswith("fastserial")]
    assert len(fast) == 3
    assert all(row["identical"] for row in fast)
    assert all(row["to_stock"]["median"] > 0 for row in fast)
    assert "read back" not in done.out  # only the scripts read anything back
    assert rows["fastserial zip"]["bytes"] == rows["stock zip"]["bytes"]
    assert found["machine"]["cores"] > 0


def test_bench_load(tmp_path: Path) -> None:
    folder, target = tmp_path / "disk", tmp_path / "out.json"
    folder.mkdir()
    words = ["--size", "9MiB", "--tensors", "5", "--runs", "1", "--no-fio", "--temperature", "warm"]
    done = command("bench", "load", "--folder", str(folder), *words, "--json", str(target))
    assert done.code == 0, done.err
    assert list(folder.iterdir()) == []
    rows = {row["name"]: row for row in json.loads(target.read_text())["tables"][0]["rows"]}
    assert {"stock zip, warm", "fastserial zip, warm", "fastserial load_into, warm"} <= set(rows)
    assert all(row["equal"] and row["to_stock"]["median"] > 0 for row in rows.values())


@pytest.mark.parametrize("words", [["bench", "save"], ["bench", "load"], ["demo"]])
def test_what_cannot_be_measured_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    for size in ("0", "-5MB"):
        done = CliRunner().invoke(app, [*words, "--folder", str(tmp_path), "--size", size])
        assert isinstance(done.exception, ConfigError), done.output
        assert f"above 0, not '{size}'" in str(done.exception)
    if "bench" in words:
        missing = ["--folder", str(tmp_path / "missing"), "--json"]
        for path in (target, tmp_path / "missing" / "out.json", tmp_path):
            done = CliRunner().invoke(app, [*words, "--size", "1MiB", *missing, str(path)])
            assert isinstance(done.exception, BenchError), done.output
    assert not list(tmp_path.iterdir())


def test_a_benchmark_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    words = ["bench", "save", "--size", "8MiB", "--runs", "1000", "--no-fio", "--no-engines"]
    with subprocess.Popen(
        [sys.executable, "-m", "fastserial", *words, "--folder", tmp_path]
    ) as one:
        while not list(tmp_path.glob("*/*")):
            assert one.poll() is None
            time.sleep(0.05)
        one.terminate()
        assert one.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_demo(tmp_path: Path) -> None:
    done = command("demo", "--folder", str(tmp_path), "--size", "20MB", "--runs", "1")
    assert done.code == 0, done.err
    assert done.out.count("  yes") == 2  # zip and legacy
    assert list(tmp_path.iterdir()) == []


def test_damage_and_what_cannot_be_read_end_differently(tmp_path: Path) -> None:
    def status_of(*words: object) -> int:
        return CliRunner().invoke(app, list(map(str, words))).exit_code

    good, source, none = tmp_path / "good.pt", tmp_path / "a.pt", tmp_path / "none"
    torch.save({"a": torch.ones(300)}, good)
    whole = good.read_bytes()
    for data, status in ((whole[:-50], 1), (b"some text", 2)):
        source.write_bytes(data)
        assert status_of("verify", good, source) == status
        assert status_of("verify", none, source, good) == status  # damage counts for more
        assert status_of("verify", source) == status_of("inspect", source) == status
        done = command("convert", source, tmp_path / "b.safetensors")
        assert done.code == status, done.err
        assert str(source) in done.err
        assert "Traceback" not in done.err
    none.mkdir()
    for words in (["verify", good], ["verify", "--threads", 2, good], ["inspect", good]):
        assert status_of(*words) == 0
    assert status_of("verify", none) == 2
