"""Safetensors files of every dtype that safetensors and torch have, two elements in a byte, too."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import _SIZE, load_file, save_file
from support.loading import filled, opened

import fastserial
from fastserial import convert, inspect, verify
from fastserial.errors import ConvertError, UnreadableTensorError

DTYPES = [dtype for dtype in _SIZE if dtype is not None]
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
needs_float4 = pytest.mark.skipif(_FLOAT4 is None, reason="this torch has no such dtype")


def every_dtype() -> dict[str, torch.Tensor]:
    found = {}
    for number, dtype in enumerate(DTYPES):
        raw = torch.arange(3 * 2 * dtype.itemsize, dtype=torch.uint8).remainder_(2)
        found[f"{number} {dtype}"] = raw.view(dtype).reshape(3, 2)
        found[f"{number} {dtype}, empty"] = raw[:0].view(dtype).reshape(2, 0)
    return found


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    data = tensor.contiguous().view(torch.uint8) if tensor.numel() else torch.empty(0)
    return tensor.dtype, tensor.shape, data.numpy().tobytes()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return {key: raw(one) for key, one in found.items()} == {
        key: raw(one) for key, one in expected.items()
    }


def test_every_dtype_is_read_and_written(tmp_path: Path) -> None:
    value, path, back = every_dtype(), tmp_path / "x.safetensors", tmp_path / "back.safetensors"
    save_file(value, path, metadata={"format": "pt"})
    assert verify(path).status == "ok"
    assert {one.key: (one.dtype, one.shape) for one in inspect(path).tensors} == {
        key: (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for key, one in value.items()
    }
    assert same(load_file(path), value)
    assert same(opened(path), value)
    assert same(fastserial.load(path), value)
    assert same(filled({key: torch.empty_like(one) for key, one in value.items()}, path), value)
    convert(path, tmp_path / "x.pt")
    assert same(torch.load(tmp_path / "x.pt"), value)
    convert(tmp_path / "x.pt", back)
    assert back.read_bytes() == path.read_bytes()
    fastserial.install(safetensors=True, small_file=0)
    try:
        save_file(value, tmp_path / "ours.safetensors", metadata={"format": "pt"})
    finally:
        fastserial.uninstall()
    assert (tmp_path / "ours.safetensors").read_bytes() == path.read_bytes()


@needs_float4
def test_half_a_byte_is_no_tensor_of_torchs(tmp_path: Path) -> None:
    """As in safetensors: a last dimension that is odd, or none."""
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    assert verify(path).status == "ok"
    with (
        pytest.raises(UnreadableTensorError, match="last dimension"),
        fastserial.open(path) as file,
    ):
        file.get_tensor("a")
    with pytest.raises(ConvertError, match="last dimension"):
        convert(path, tmp_path / "x.pt")
    assert _FLOAT4 is not None
    torch.save({"a": torch.zeros((), dtype=torch.uint8).view(_FLOAT4)}, tmp_path / "x.pt")
    with pytest.raises(ConvertError, match="float4"):
        convert(tmp_path / "x.pt", path)
