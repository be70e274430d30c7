"""What commands print: nothing from a file reaches the terminal raw, and errors are one line."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import python

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


def test_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from fastserial.cli.main import main; "
        f"sys.argv = ['fastserial', 'convert', {str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r}]; "
        "main()"
    )
    done = python("-c", program, code=2)
    assert done.err == "error: this needs torch, which is not installed: pip install torch\n"
