"""What a file is taken for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fastserial.formats.container import Format, detect
from fastserial.formats.source import DescriptorSource


def kind_of(path: Path) -> Format:
    fd = os.open(path, os.O_RDONLY)
    try:
        return detect(DescriptorSource(fd), str(path))
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("zip_container", [True, False])
def test_first_bytes_count_more_than_the_name(
    tmp_path: Path, name: str, zip_container: bool
) -> None:
    path = tmp_path / name
    torch.save({"w": torch.ones(9)}, path, _use_new_zipfile_serialization=zip_container)
    assert kind_of(path) is (Format.ZIP if zip_container else Format.LEGACY)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    if name == "a.safetensors":
        assert kind_of(path) is Format.SAFETENSORS
    else:
        assert kind_of(path) is (Format.DAMAGED_ZIP if zip_container else Format.OTHER)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert kind_of(tmp_path) is Format.FOLDER
    assert kind_of(Path(os.devnull)) is Format.SPECIAL
    for name, text, found in (
        ("a.pt", b"", Format.EMPTY),
        ("a.pt", b"text", Format.OTHER),
        ("__0_0.distcp", b"PK\x03\x04", Format.SHARD),
    ):
        (tmp_path / name).write_bytes(text)
        assert kind_of(tmp_path / name) is found
