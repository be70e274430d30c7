"""Nothing costs much more than it weighs, whatever a file says of itself, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import costly
from support.forms import FULL
from support.limits import peak

import fastserial
from fastserial.cli.main import app
from fastserial.formats import pickles

_SECONDS, _SECONDS_PER_MB = 10.0, 1.0
_MEMORY = 1 << 30


def costs(call: Callable[[], Any], weight: int) -> None:
    """A call may fail, with an error of ours, but not take more memory or processor time."""
    began = time.process_time()

    def without_errors() -> None:
        with contextlib.suppress(fastserial.FastserialError):
            call()

    nbytes = peak(without_errors)
    seconds = time.process_time() - began
    assert seconds < _SECONDS + _SECONDS_PER_MB * weight / 1e6, f"{seconds} s"
    assert nbytes < _MEMORY, f"{nbytes} bytes"


def shown(*words: str) -> None:
    """A command ends with one of its exit statuses."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        assert app([*words], standalone_mode=False) in (None, 0, 1, 2)


@pytest.mark.parametrize(
    "name", sorted(costly.FILES if FULL else costly.FILES.keys() - costly.LONGEST)
)
def test_a_file_costs_what_it_weighs(name: str, tmp_path: Path) -> None:
    path = costly.file(tmp_path / name.replace(" ", "-"), costly.FILES[name]())
    weight = path.stat().st_size
    target = {"w": torch.zeros(2)}
    for call in (
        lambda: shown("inspect", str(path), "--records"),
        lambda: shown("inspect", str(path), "--json"),
        lambda: shown("verify", str(path)),
        lambda: fastserial.open(path),
        lambda: fastserial.load_into(target, path, strict=False),
        lambda: fastserial.convert(path, tmp_path / "out.pt"),
    ):
        costs(call, weight)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", costly.FOLDERS)
def test_a_folder_costs_what_it_weighs(name: str, tmp_path: Path) -> None:
    path = costly.FOLDERS[name](tmp_path / "x")
    weight = sum(one.stat().st_size for one in path.iterdir())
    for call in (
        lambda: shown("inspect", str(path), "--records"),
        lambda: shown("inspect", str(path), "--json"),
        lambda: shown("verify", str(path)),
        lambda: fastserial.convert(path, tmp_path / "out.pt"),
    ):
        costs(call, weight)


def test_only_the_bytes_of_a_pickle_allow_it_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small pickle that names a million tensors, beside bytes that are not read."""
    monkeypatch.setattr(pickles, "_LEAST_MEMORY", 4 << 20)
    names: Any = torch.zeros(1)
    for _ in range(3):
        names = {f"k{number}": names for number in range(100)}
    paths = [tmp_path / f"{name}.pt" for name in ("small", "text", "padded", "legacy")]
    small, text, padded, legacy = paths
    torch.save(names, small)
    torch.save([names, "x" * (1 << 20)], text)
    with zipfile.ZipFile(small) as archive, zipfile.ZipFile(padded, "w") as copy:
        for name in archive.namelist():
            more = bytes(1 << 20) if name.endswith("data.pkl") else b""
            copy.writestr(name, archive.read(name) + more)
    rows = torch.zeros(1 << 20, dtype=torch.uint8)
    torch.save([names, rows], legacy, _use_new_zipfile_serialization=False)
    for path in paths:
        assert 0 < len(fastserial.inspect(path).tensors) < 5000, path


@pytest.mark.parametrize("kind", [dict, list])
def test_many_empty_containers_beside_a_tensor(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lead to no tensor, and cost no more than they weigh."""
    monkeypatch.setattr(pickles, "_LEAST_MEMORY", 1 << 20)
    path = tmp_path / "x.pt"
    torch.save({"a": [kind() for _ in range(50_000)], "w": torch.ones(3)}, path)
    with fastserial.open(path) as file:
        assert file.keys() == ["w"]
    assert fastserial.inspect(path).values == 0


def test_millions_of_numbers_beside_a_tensor(tmp_path: Path) -> None:
    """As stock, and in less time; they need no names."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(3), "samples": list(range(300_000))}, path)
    began = time.process_time()
    torch.load(path)
    stock = time.process_time() - began
    began = time.process_time()
    with fastserial.open(path) as file:
        assert file.keys() == ["w"]
    assert time.process_time() - began < 3 * stock
    assert fastserial.inspect(path).values == 300_000


def test_items_of_one_tensor_may_share_their_bytes(tmp_path: Path) -> None:
    """As where tied weights are stored once; they are read once, and not called damaged."""
    whole = costly.metadata(
        costly.mapped([part for key in "ab" for part in (costly.text(key), costly.dcp_tensor())]),
        costly.mapped([part for key in "ab" for part in (costly.index(key), costly.place())]),
    )
    path = costly.folder(tmp_path / "x", whole)
    assert fastserial.verify(path).status == "ok"
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"K\x10", b"K\x0f", 1))  # one is shorter
    report = fastserial.verify(path)
    assert (report.status, report.problems[0].file) == ("damaged", "__0_0.distcp"), report
    assert os.listdir(tmp_path) == ["x"]
