"""Archives that other programs wrote or changed: read as torch reads them, and verified."""

from __future__ import annotations

import io
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.archives import APPENDED, REWRITTEN, appended, checkpoint, rewritten, state
from support.damage import flip
from support.identity import digest, stock
from support.loading import DEFAULT, FORCED, both, forced

import fastserial
from fastserial.checkpoints.verify import VerifyReport, verify
from fastserial.config import Config
from fastserial.errors import (
    CorruptCheckpointError,
    LoadMismatchError,
    UnreadableCheckpointError,
    UnreadableTensorError,
)
from fastserial.formats.source import BytesSource, DescriptorSource
from fastserial.formats.zip_format import read_directory

SMALL = Config(block_size=4096, queue_depth=3, threads=2)
WAYS = (DEFAULT, *FORCED.values())
STORED, DEFLATED, BZIP2 = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with forced(monkeypatch, 5000):
        yield


def check(path: Path, data: bytes) -> VerifyReport:
    path.write_bytes(data)
    return verify(path, SMALL)


def opened(path: Path) -> dict[str, torch.Tensor]:
    with fastserial.open(path) as file:
        return {key: file.get_tensor(key) for key in file}


def filled(path: Path) -> dict[str, torch.Tensor]:
    target = {key: torch.zeros_like(value) for key, value in state().items()}
    fastserial.load_into(target, path)
    return target


def loads(path: Path) -> bool:
    """Whether stock torch loads a file, and each of our ways gives the same."""
    want = both(lambda: torch.load(path), *WAYS)
    if want.error is None:
        assert digest(fastserial.load(path, verify=True)) == digest(want.value)
    return want.error is None


def spoiled(path: Path) -> Path:
    """Change a byte of the largest record."""
    with path.open("rb") as file:
        records = read_directory(DescriptorSource(file.fileno())).records
    largest = max(records, key=lambda record: record.compressed_size)
    flip(path, (largest.data_offset + largest.data_end) // 2)
    return path


# -- whole archives ------------------------------------------------------------------------------


def behind(count: int) -> bytes:
    return checkpoint() + bytes(count)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    **{name: partial(rewritten, checkpoint(), **how) for name, how in REWRITTEN.items()},
    **{f"added: {name}": partial(appended, checkpoint(), *what) for name, what in APPENDED.items()},
    **{f"{count} bytes behind": partial(behind, count) for count in (1, 65_557, 69_562)},
}
INFO_ZIP = {
    "streamed": "zip -q -fd -r -0 - archive/data.pkl archive > x.pt",
    "descriptors": "zip -q -fd -r -0 x.pt archive/data.pkl archive",
    "stored": "zip -q -r -0 x.pt archive/data.pkl archive",
    "deflated": "zip -q -r -9 x.pt archive/data.pkl archive",
    "one deleted": "cp original x.pt && zip -q -d x.pt archive/byteorder",
    "one changed": "cp original x.pt && zip -q -0 x.pt archive/version",
    "one added": "cp original x.pt && echo 1 > archive/note && zip -q x.pt archive/note",
    "encrypted": "cp original x.pt && echo 1 > archive/note && zip -q -P word x.pt archive/note",
}


@pytest.mark.parametrize("name", [*ARCHIVES, *(f"Info-ZIP: {name}" for name in INFO_ZIP)])
def test_all_that_read_it_agree(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    if name in ARCHIVES:
        path.write_bytes(ARCHIVES[name]())
    elif shutil.which("zip") is None:
        pytest.skip("needs Info-ZIP's zip")
    else:
        (tmp_path / "original").write_bytes(checkpoint())
        with zipfile.ZipFile(tmp_path / "original") as file:
            file.extractall(tmp_path)
        command = INFO_ZIP[name.removeprefix("Info-ZIP: ")]
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    want = digest(state())
    assert loads(path)
    assert digest(fastserial.load(path)) == want
    for read in (opened, filled):
        if "deflated" in name and name in REWRITTEN:
            with pytest.raises((UnreadableTensorError, LoadMismatchError), match="compressed"):
                read(path)
        else:
            assert digest(read(path)) == want
    report = verify(path, SMALL)
    assert report.ok, report
    assert report.checked_bytes
    assert verify(spoiled(path), SMALL).status == "damaged"


def test_as_far_from_the_end_as_torch_looks(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(behind(69_563))
    assert not loads(path)
    with pytest.raises(CorruptCheckpointError):
        opened(path)


TWICE: dict[str, tuple[str, bytes]] = {
    "equal": ("archive/data/0", bytes(state()["w"].numpy())),
    "a storage": ("archive/data/0", bytes(state()["w"].flip(0).numpy())),
    "the pickle": ("archive/DATA.pkl", b"1"),  # torch's reader compares without case
}


@pytest.mark.parametrize("name", TWICE)
def test_two_records_of_one_name(name: str, tmp_path: Path) -> None:
    """Torch's reader takes one of them: it is asked to, or the other tools refuse the file."""
    path = tmp_path / "x.pt"
    added, body = TWICE[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path.write_bytes(appended(checkpoint(), (added, body, STORED)))
    loads(path)
    assert verify(path, SMALL).ok is (name == "equal")
    for read in (opened, filled):
        if name == "equal":
            assert digest(read(path)) == digest(state())
        else:
            with pytest.raises(UnreadableCheckpointError, match=r"several .*: use torch\.load"):
                read(path)


@pytest.mark.parametrize("bit", range(16))
def test_the_flags_that_torch_refuses(bit: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    data = bytearray(rewritten(checkpoint(), compression=DEFLATED))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        at = archive.start_dir + 8  # the flags of the first entry
    data[at + bit // 8] ^= 1 << bit % 8
    assert check(path, data).ok is loads(path) is (bit not in (0, 5, 6, 13))


@pytest.mark.parametrize("compression", [STORED, DEFLATED])
def test_what_is_whole_is_loaded(compression: int, tmp_path: Path) -> None:
    """Whatever byte of the directory is another, or gone: the local headers tell."""
    path = tmp_path / "x.pt"
    data = rewritten(checkpoint(), compression=compression)
    want, passed = digest(state()), 0
    for at in range(read_directory(BytesSource(data)).end.directory_offset, len(data) - 22):
        for value in (data[at] ^ 1 << at % 8, 0):
            damaged = bytearray(data)
            damaged[at] = value
            if check(path, damaged).ok:
                passed += 1
                with stock():
                    assert digest(torch.load(path)) == want, (at, value)
    assert passed > 20  # dates and versions


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
    "a record outside": appended(checkpoint(), ("note", b"1", STORED)),
    "in bzip2": rewritten(checkpoint(), compression=BZIP2),
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


# -- other archives ------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_whole_archive_that_is_no_checkpoint(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    save(path, a=np.arange(3000), b=np.zeros(3))
    report = verify(path, SMALL)
    assert (report.status, report.problems) == ("unreadable", [])
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
    assert report.status == ("ok" if save is _script else "unreadable"), report
    assert not report.problems
    assert verify(spoiled(path), SMALL).status == "damaged"


# -- disk errors ---------------------------------------------------------------------------------
