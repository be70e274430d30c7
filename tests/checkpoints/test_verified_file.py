"""What was verified is what is read, and all that is read was verified."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.loading import last_report

import fastserial
from fastserial import convert, load, load_into
from fastserial.checkpoints import load as loading
from fastserial.checkpoints import verify as verification
from fastserial.distributed import FastStorageReader
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_directory
from fastserial.loading.prefetch import FastZipReader


@pytest.mark.parametrize("what", ["convert", "load_into", "load"])
def test_the_file_that_was_verified_is_read(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file, with damage, gets its name after the check."""
    path, other = tmp_path / "source.pt", tmp_path / "other.pt"
    torch.save({"a": torch.ones(300)}, path)
    data = path.read_bytes()
    at = data.index(torch.ones(300).numpy().tobytes())
    other.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    check = verification._verify

    def swap(name: str, opened: int | None, config: Any) -> Any:
        report = check(name, opened, config)
        os.replace(other, path)
        return report

    monkeypatch.setattr(verification, "_verify", swap)
    if what == "convert":
        convert(path, tmp_path / "t.pt", verify=True)
        assert torch.load(tmp_path / "t.pt")["a"].tolist() == [1.0] * 300
    elif what == "load_into":
        target = {"a": torch.zeros(300)}
        load_into(target, path, verify=True)
        assert target["a"].tolist() == [1.0] * 300
    else:
        monkeypatch.setattr(loading, "_function", lambda: torch.load)  # a torch without a patch
        with pytest.raises(CorruptCheckpointError, match="changed"):
            load(path, verify=True)


class EarlierTorch:
    """torch's reader before it refused storages that are shorter than their record."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def get_record(self, name: str) -> bytes:
        return self.data

    def get_storage_from_record(self, name: str, numel: int, kind: Any) -> Any:
        return torch.frombuffer(bytearray(self.data[:numel]), dtype=torch.uint8)._typed_storage()


def test_a_record_that_is_longer_than_its_storage() -> None:
    """The checksum is that of the whole record, of which torch reads the beginning."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data/0", bytes(1000))
    with tempfile.TemporaryFile() as real:
        real.write(file.getvalue())
        real.flush()
        directory = read_directory(DescriptorSource(real.fileno()))
    for damage, data in ((False, bytes(1000)), (True, bytes(999) + b"x")):
        reader = FastZipReader(EarlierTorch(data), "a.pt", 10**6, directory, verify=True)
        context = pytest.raises(CorruptCheckpointError, match="data/0") if damage else nullcontext()
        with context:
            reader.get_storage_from_record("data/0", 500, torch.UntypedStorage)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_folder_without_checksums_is_not_verified(checksums: bool, tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            dcp.save({"text": "abc"}, checkpoint_id=tmp_path)
            found = {"text": ""}
            with fastserial.options(verify_on_load=True):
                dcp.load(found, storage_reader=FastStorageReader(tmp_path))
    finally:
        torch.serialization.set_crc32_options(before)
    assert found == {"text": "abc"}
    report = last_report()
    assert report.verified == checksums
