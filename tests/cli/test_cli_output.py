"""What commands print: nothing from a file reaches the terminal raw, and errors are one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.identity import stock_bytes
from support.processes import python

import fastserial
from fastserial.cli import main
from fastserial.printable import printable

HOSTILE = (
    "\x1b[2J\x1b]0;title\x07 \r\n| forged | row | [red]m[/red] [/] :x: "
    "\x00\x7f\x9b31m\u2028\u2029\u202ertl\u200b\ufeff\ud800\udcff end"
)
SHOWN = r"\x1b[2J\x1b]0;title\x07 \r\n| forged | row | [red]m[/red] [/] :x: "
HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `fastserial` in this process; return its exit status, output and errors."""

    def run(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fastserial", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main.main()
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return run


def hidden_in(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in HIDDEN} - {"\n"}


# -- escaping ------------------------------------------------------------------------------------


def test_printable() -> None:
    assert printable("model.läyers.0.重み") == "model.läyers.0.重み"
    shown = printable(HOSTILE)
    assert shown.startswith(SHOWN)
    assert not hidden_in(shown)
    assert "\n" not in shown
    assert printable(shown) == shown
    shown.encode()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_hostile_keys(command: Command, tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    state = {HOSTILE: torch.ones(2), "view": torch.zeros(9)[:2]}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    status, said, _ = command("inspect", path, "--records")
    assert status == 0
    assert not hidden_in(said)
    rows = [line for line in said.splitlines() if line.startswith(SHOWN)]
    assert len(rows) == 1
    assert "float32" in rows[0]
    if zipped:
        data = bytearray(path.read_bytes())
        data[bytes(data).index(torch.ones(2).numpy().tobytes())] ^= 1
        path.write_bytes(data)
        status, said, _ = command("verify", path)
        assert status == 1
        assert not hidden_in(said)
        assert SHOWN in said
        assert len(said.splitlines()) == 3


def test_hostile_keys_of_safetensors(command: Command, tmp_path: Path) -> None:
    path, target = tmp_path / "x.safetensors", tmp_path / "t.safetensors"
    header = json.dumps({HOSTILE: {"dtype": "\x1b[1m", "shape": [], "data_offsets": [0, 0]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    status, said, _ = command("inspect", path)
    assert status == 0
    assert SHOWN in said
    assert r"\x1b[1m" in said
    assert not hidden_in(said)
    status, _, said = command("convert", path, target)
    assert status == 2
    assert not hidden_in(said)
    assert len(said.splitlines()) == 1


def test_hostile_paths(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "d\x1b[31m\n[red]x\udcff"
    folder.mkdir()
    path = folder / "n\x1b[31m\nok forged.pt"
    torch.save({"a": torch.ones(2)}, path)
    for words in (
        ("verify", folder),
        ("inspect", path),
        ("convert", path, folder / "t.pt"),
        ("convert", path, folder / "missing" / "t.pt"),
        ("inspect", folder),
        ("verify", path, folder / "missing"),
        ("doctor", path),
        ("doctor", folder),
    ):
        _, out, err = command(*words)
        assert r"\x1b[31m\n" in out + err, words
        assert not hidden_in(out + err), words
        assert not [line for line in (out + err).splitlines() if line.startswith("ok forged")]


# -- exit status and words -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["verify {0}", "inspect --json {0}"],
)
def test_output_that_nobody_reads_is_no_damage(words: str, tmp_path: Path) -> None:
    """The reader of a pipe is gone, the disk of a log is full: the result could not be told."""
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(3)}, path)
    line = shlex.join([sys.executable, "-m", "fastserial", *words.format(path).split()])
    done = subprocess.run(
        ["bash", "-c", f"{line} | true; echo ${{PIPESTATUS[0]}}; {line} > /dev/full; echo $?"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2\n2\n", done.stderr
    assert done.stderr == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("words", [["verify"], ["convert"]])
def test_closed_streams(words: list[str], tmp_path: Path) -> None:
    """No file gets the number of a standard stream, to which C code writes."""
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(3)}, path)
    more = [str(tmp_path / "b.pt")] * (words == ["convert"])
    line = shlex.join([sys.executable, "-m", "fastserial", *words, str(path), *more])
    subprocess.run(["bash", "-c", f"{line} >&- 2>&- <&-"], check=True)


def test_an_error_that_nobody_expected_is_no_damage(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(3)}, path)
    for error in (
        ValueError("what"),
        EOFError("what"),
        RecursionError("what"),
        MemoryError("what"),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr("fastserial.checkpoints.inspect.inspect", fail)
        status, out, err = command("inspect", path)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert type(error).__name__ in err
        assert len(err.splitlines()) == 1


def test_inspect_goes_on_after_what_it_cannot_read(command: Command, tmp_path: Path) -> None:
    """And its JSON has one shape."""
    key, deep = b"X\1\0\0\0w", b")" + b"\x85" * 300_000  # beyond the limits: it cannot be hashed
    whole = stock_bytes({"w": torch.ones(3)}, "legacy")
    for name, data in (("a", whole.replace(key, deep)), ("b", whole), ("c", whole[:-3])):
        (tmp_path / f"{name}.pt").write_bytes(data)
    for path, status, count in (
        (tmp_path, 1, 1),
        (tmp_path / "a.pt", 2, 0),
        (tmp_path / "b.pt", 0, 1),
    ):
        code, out, _ = command("inspect", "--json", path)
        found = json.loads(out)
        assert found.keys() == {"status", "files", "errors"}
        assert code == found["status"] == status
        assert len(found["files"]) == count
    code, out, err = command("inspect", tmp_path)
    assert code == 1
    assert "float32" in out
    assert [line.partition(":")[0] for line in err.splitlines()] == ["unreadable", "damaged"]


@pytest.mark.parametrize("name", ["x\0y", "\ud800", "..", "", "a/b"])
def test_an_index_names_files_that_cannot_be(command: Command, name: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert command("verify", index)[0] == 1
    assert command("inspect", index)[0] == 2
    assert command("convert", index, tmp_path / "t.pt")[0] == 1


def test_an_index_that_is_a_pipe(command: Command, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    os.mkfifo(index)
    for words in (["verify", index], ["inspect", index], ["convert", index, tmp_path / "t.pt"]):
        assert command(*words)[0] == 2


def test_paths_that_cannot_be() -> None:
    for path in ("x\0y", "\ud800"):
        assert fastserial.verify(path).status == "unreadable"


def test_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from fastserial.cli.main import main; "
        f"sys.argv = ['fastserial', 'convert', {str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r}]; "
        "main()"
    )
    done = python("-c", program, code=2)
    assert done.err == "error: this needs torch, which is not installed: pip install torch\n"
