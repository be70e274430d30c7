"""fastserial.convert: the same values in another container, nothing else."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import MIB, noise
from support.damage import flip
from support.identity import saved, stock
from support.limits import peak

from fastserial.distributed.convert import Container, convert
from fastserial.errors import (
    ConvertError,
    CorruptCheckpointError,
    WriteError,
)

FORMATS = ("zip", "legacy")


def test_the_legacy_format_is_not_written(tmp_path: Path) -> None:
    source = saved(tmp_path, {"a": torch.ones(3)})
    with pytest.raises(ConvertError, match=r"not 'legacy'.*_use_new_zipfile"):
        convert(source, tmp_path / "target.pt", "legacy")  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: {"a": torch.ones(3), "epoch": 5}, "'epoch'.* of type int, not a tensor"),
    "nested": (lambda: {"model": {"a": torch.ones(3)}}, "'model'.*key"),
    "list": (lambda: [torch.ones(3)], "dictionary of tensors"),
    "no container": (lambda: 3, "nothing of type int"),
    "int_key": (lambda: {1: torch.ones(3)}, "entry 1.* of type int, not a string"),
    "surrogate": (lambda: {"bad\ud800": torch.ones(1)}, "no valid Unicode"),
    "sparse": (lambda: {"s": torch.eye(3).to_sparse()}, "'s'"),
    "quantized": (
        lambda: {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
        "'q'",
    ),
    "complex128": (lambda: {"c": torch.ones(3, dtype=torch.complex128)}, "'c'.*complex128"),
    "expanded": (lambda: {"e": torch.zeros(1).expand(2 * 10**9)}, "'e'.*expand.*--copy-shared"),
    "meta": (lambda: {"m": torch.empty(3, device="meta")}, "'m'"),
}


NOT_IN_A_FOLDER: dict[str, tuple[Callable[[], Any], str]] = {
    "joined": (lambda: {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, r"same one \(.*a\.b\)"),
    "number": (lambda: {1: torch.ones(1), "1": torch.ones(2)}, r"same one \(.*1\)"),
    "sparse": (lambda: {"x": {"s": torch.eye(5).to_sparse()}}, r"'x\.s' .* torch.sparse_coo"),
    "meta": (lambda: {"m": torch.empty(3, device="meta")}, r"'m' .* memory \(device meta\)"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("to", "name"),
    [*(("safetensors", name) for name in REFUSED), *(("dcp", name) for name in NOT_IN_A_FOLDER)],
)
def test_what_others_cannot_hold(to: Container, name: str, tmp_path: Path) -> None:
    make, text = (NOT_IN_A_FOLDER if to == "dcp" else REFUSED)[name]
    source, target = saved(tmp_path, make()), tmp_path / "new" / "folder"
    if to == "dcp":
        text = rf"f\.pt: .*{text}.*--key"
    else:
        target = tmp_path / "old"
        target.write_bytes(b"old")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConvertError, match=text) as caught:
        convert(source, target, to)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before
    assert to == "dcp" or target.read_bytes() == b"old"


def test_shared_memory(tmp_path: Path) -> None:
    base = torch.randn(100)
    source = saved(tmp_path, {"a": base, "b": base[10:20], "c": torch.ones(2)})
    target = tmp_path / "t.safetensors"
    with pytest.raises(
        ConvertError, match=r"'a' and 'b' share .*copy_shared=True \(--copy-shared\) writes"
    ):
        convert(source, target)
    convert(source, target, copy_shared=True)
    safetensors = pytest.importorskip("safetensors.torch")
    loaded = safetensors.load_file(target)
    assert torch.equal(loaded["b"], base[10:20])
    lazy = torch.randn(9, dtype=torch.complex64).conj()
    apart = saved(tmp_path, {"a": base[:50], "b": base[50:], "c": lazy})  # a and b of one storage
    convert(apart, target)
    assert torch.equal(safetensors.load_file(target)["b"], base[50:])
    assert torch.equal(safetensors.load_file(target)["c"], lazy)


def test_part(tmp_path: Path) -> None:
    value = {"model": {"a": torch.ones(3)}, "epoch": 3, "deep": {"er": {"b": torch.zeros(2)}}}
    source = saved(tmp_path, value)
    convert(source, tmp_path / "m.safetensors", key="model")
    with pytest.raises(ConvertError, match="no 'nothing' in 'deep'; there are: 'er'"):
        convert(source, tmp_path / "m.pt", key="deep.nothing")
    with pytest.raises(ConvertError, match="no 'x' in 'epoch'"):
        convert(source, tmp_path / "m.pt", key="epoch.x")
    with pytest.raises(ConvertError, match="no '' in 'model'; there are: 'a'"):
        convert(source, tmp_path / "m.pt", key="model.")


@pytest.mark.parametrize(
    ("key", "size"),
    [
        ("a.b", 1), ("a.b.c", 3), ("x.y.z.w", 4), ("7", 5), ("list.1", 6), ("list", None),
        ("empty.", 8), ("True", 9), ("1.5", 10), ("None", 11), ("(1, 2)", 12),
    ],
)  # fmt: skip
def test_parts_by_the_names_that_inspect_shows(key: str, size: int | None, tmp_path: Path) -> None:
    value = {
        "a": {"b": torch.ones(2)},
        "a.b": {"c": torch.ones(3)},
        "x.y": {"z.w": torch.ones(4)},
        7: torch.ones(5),
        "list": [torch.ones(1), torch.ones(6)],
        "empty": {"": torch.ones(8)},
        True: torch.ones(9),
        1.5: torch.ones(10),
        None: torch.ones(11),
        (1, 2): torch.ones(12),
    }
    target = tmp_path / "target.pt"
    convert(saved(tmp_path, value), target, key=key)
    with stock():
        found = torch.load(target)
    assert len(found) == (size or 2)


def test_damaged_sources(tmp_path: Path) -> None:
    source, target = saved(tmp_path, {"a": noise(50_000)}), tmp_path / "t.pt"
    data = source.read_bytes()
    flip(source, 20_000)
    with pytest.raises(CorruptCheckpointError, match=r"f\.pt.*data/0"):
        convert(source, target)
    for broken in (data[:30_000], data[:2], b"", b"text"):
        source.write_bytes(broken)
        with pytest.raises((CorruptCheckpointError, RuntimeError)):
            convert(source, target)
    with pytest.raises(FileNotFoundError):
        convert(tmp_path / "missing", target)
    with pytest.raises(WriteError):
        convert(saved(tmp_path, {"a": noise(9)}), tmp_path / "no" / "t.pt")
    assert sorted(os.listdir(tmp_path)) == ["f.pt"]


@pytest.mark.parametrize("to", ["zip", "safetensors"])
def test_memory(to: Container, tmp_path: Path) -> None:
    """Streaming: the peak of resident memory does not follow the checkpoint's size."""
    base = noise(20 * MIB)
    turned = {f"y{n}": base.view(-1, n).t() for n in (20, 40, 80, 160, 320)}
    source = saved(tmp_path, {"x": noise(160 * MIB), **turned}, "zip")
    convert(saved(tmp_path, {"x": noise(9)}, name="warm.pt"), tmp_path / "warm", to)
    gc.collect()
    assert peak(lambda: convert(source, tmp_path / "target", to, copy_shared=True)) < 96 * MIB
    for file in tmp_path.iterdir():
        file.unlink()
