"""`verify` of archives that other programs wrote or changed: damage is what a reader notices."""

from __future__ import annotations

import io
import pickle
import shutil
import subprocess
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.archives import APPENDED, REWRITTEN, appended, checkpoint, rewritten
from support.damage import bad_sectors
from support.identity import digest, stock

import fastserial
from fastserial.checkpoints.verify import VerifyReport, verify
from fastserial.config import Config
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip.directory import read_directory

SMALL = Config(block_size=4096, queue_depth=3, threads=2)


def check(path: Path, data: bytes) -> VerifyReport:
    path.write_bytes(data)
    return verify(path, SMALL)


def loads(path: Path) -> bool:
    """Whether stock torch loads a file, and our verified load gives the same."""
    try:
        with stock():
            value = torch.load(path)
    except Exception:
        return False
    assert digest(fastserial.load(path, verify=True)) == digest(value)
    return True


def spoiled(path: Path) -> Path:
    """Change a byte of the largest record."""
    data = bytearray(path.read_bytes())
    with path.open("rb") as file:
        records = read_directory(DescriptorSource(file.fileno())).records
    largest = max(records, key=lambda record: record.compressed_size)
    data[(largest.data_offset + largest.data_end) // 2] ^= 0x10
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", REWRITTEN)
def test_written_by_zipfile(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    report = check(path, rewritten(checkpoint(), **REWRITTEN[name]))
    assert loads(path)
    assert report.ok, report
    assert report.checked_bytes
    assert verify(spoiled(path), SMALL).status == "damaged"


@pytest.mark.parametrize("name", APPENDED)
def test_records_that_were_added(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    report = check(path, appended(checkpoint(), *APPENDED[name]))
    assert loads(path)
    assert report.ok, report
    assert verify(spoiled(path), SMALL).status == "damaged"


ZIP_COMMANDS = {
    "streamed": "zip -q -fd -r -0 - archive/data.pkl archive > x.pt",
    "descriptors": "zip -q -fd -r -0 x.pt archive/data.pkl archive",
    "stored": "zip -q -r -0 x.pt archive/data.pkl archive",
    "deflated": "zip -q -r -9 x.pt archive/data.pkl archive",
    "one deleted": "cp original x.pt && zip -q -d x.pt archive/byteorder",
    "one changed": "cp original x.pt && zip -q -0 x.pt archive/version",
    "one added": "cp original x.pt && echo 1 > archive/note && zip -q x.pt archive/note",
}


@pytest.mark.parametrize("name", ZIP_COMMANDS)
def test_written_by_info_zip(name: str, tmp_path: Path) -> None:
    if shutil.which("zip") is None:
        pytest.skip("needs Info-ZIP's zip")
    (tmp_path / "original").write_bytes(checkpoint())
    with zipfile.ZipFile(tmp_path / "original") as file:
        file.extractall(tmp_path)
    subprocess.run(ZIP_COMMANDS[name], shell=True, cwd=tmp_path, check=True)
    path = tmp_path / "x.pt"
    assert loads(path)
    report = verify(path, SMALL)
    assert report.ok, report
    assert verify(spoiled(path), SMALL).status == "damaged"


def test_an_added_record_of_the_name_of_another(tmp_path: Path) -> None:
    """Which one counts is up to the reader, if it is part of the checkpoint."""
    path = tmp_path / "x.pt"
    data = checkpoint()
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        same = file.read("archive/data/0")
    stored = zipfile.ZIP_STORED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twice = appended(data, ("archive/n", b"1", stored), ("archive/n", b"2", stored))
        equal = appended(data, ("archive/data/0", same, stored))
        other = appended(data, ("archive/data/0", same[::-1], stored))
        cased = appended(data, ("archive/DATA.pkl", b"1", stored))
    assert check(path, twice).ok
    assert check(path, equal).ok
    assert [p.record for p in check(path, other).problems] == ["data/0"]
    assert check(path, cased).status == "damaged"  # torch's reader compares names without case


@pytest.mark.parametrize(("at", "value"), [(34, b"\x02\x00"), (38, b"\x10\x00\x00\x00")])
def test_entries_of_which_torch_reads_no_data(at: int, value: bytes, tmp_path: Path) -> None:
    """They say that a record is in another part of the archive, or a folder."""
    path = tmp_path / "x.pt"
    data = bytearray(rewritten(checkpoint()))
    entry = data.rindex(b"archive/data/0") - 46
    data[entry + at : entry + at + len(value)] = value
    report = check(path, data)
    assert [(problem.kind, problem.record) for problem in report.problems] == [
        ("directory", "data/0")
    ]


# -- what torch cannot load ----------------------------------------------------------------------


def _cut(name: str, body: bytes) -> tuple[str, bytes]:
    return name, body[: len(body) // 2] if name.endswith("data.pkl") else body


def _bare(name: str, body: bytes) -> tuple[str, bytes]:
    return name.partition("/")[2], body


def _without(record: str) -> Any:
    return lambda name, body: None if name == f"archive/{record}" else (name, body)


NOT_LOADED = {
    "pickle cut short": rewritten(checkpoint(), change=_cut),
    "no folder": rewritten(checkpoint(), change=_bare),
    "no pickle": rewritten(checkpoint(), change=_without("data.pkl")),
    "no version": rewritten(checkpoint(), change=_without("version")),
    "a record outside": appended(checkpoint(), ("note", b"1", zipfile.ZIP_STORED)),
    "in bzip2": rewritten(checkpoint(), compression=zipfile.ZIP_BZIP2),
}


@pytest.mark.parametrize("name", NOT_LOADED)
def test_what_torch_cannot_load(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    report = check(path, NOT_LOADED[name])
    assert not loads(path)
    assert report.status == "damaged", report


def test_a_pickle_cut_short_by_torchs_writer(tmp_path: Path) -> None:
    """Every checksum is right, and so is the layout."""
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(io.BytesIO(checkpoint())) as file:
        records = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    for length in (len(records["data.pkl"]), len(records["data.pkl"]) - 1, 40, 1, 0):
        writer = torch._C.PyTorchFileWriter(str(path))
        for name, body in records.items():
            if name not in ("version", ".data/serialization_id"):
                body = body[:length] if name == "data.pkl" else body
                writer.write_record(name, body, len(body))
        writer.write_end_of_file()
        del writer
        report = verify(path, SMALL)
        whole = length == len(records["data.pkl"])
        assert loads(path) == whole
        assert report.ok == whole, report
        assert {problem.kind for problem in report.problems} == (set() if whole else {"pickle"})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_every_protocol_are_whole(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    value = {"a": torch.ones(9), "set": {1, 2}, "bytes": bytearray(5), "text": "x" * 300}
    with stock():
        torch.save(value, path, pickle_protocol=protocol)
    assert verify(path, SMALL).ok


# -- other archives ------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_whole_archive_that_is_no_checkpoint(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    save(path, a=np.arange(3000), b=np.zeros(3))
    report = verify(path, SMALL)
    assert (report.status, report.problems) == ("unreadable", ())
    assert any("whole archive, but no checkpoint" in note for note in report.notes)
    assert report.checked_bytes
    report = verify(spoiled(path), SMALL)
    assert report.status == "damaged"
    assert report.problems[0].record == "/a.npy"


def _package(path: Path) -> None:
    from torch.package import PackageExporter

    with PackageExporter(str(path)) as file:
        file.save_pickle("model", "model.pkl", {"x": torch.ones(3000)})


def _exported(path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(30, 40), (torch.randn(2, 30),))
    torch.export.save(program, path)


def _script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(30, 40)), path)


@pytest.mark.parametrize("save", [_package, _exported, _script])
def test_other_archives_of_torch(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(path)
    report = verify(path, SMALL)
    assert report.ok, report
    assert verify(spoiled(path), SMALL).status == "damaged"


# -- disk errors ---------------------------------------------------------------------------------


def test_disk_errors_in_two_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one does not hide the second."""
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as file:
        for name, body in (("data.pkl", pickle.dumps(1, 2)), ("version", b"3\n")):
            file.writestr(f"a/{name}", body)
        for number in range(3):
            file.writestr(f"a/data/{number}", bytes(30_000))
    bad_sectors(monkeypatch, 10_000, 80_000)
    report = verify(path, SMALL)
    found = {(problem.kind, problem.record) for problem in report.problems}
    assert found == {("read", "data/0"), ("read", "data/2")}
