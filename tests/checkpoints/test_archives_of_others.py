"""Archives that other programs wrote or changed: read as torch reads them, and verified."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.archives import APPENDED, REWRITTEN, appended, checkpoint, rewritten, state, unusual
from support.damage import flip
from support.identity import digest
from support.loading import DEFAULT, FORCED, both, filled, opened
from support.nests import blank

import fastserial
from fastserial.checkpoints.verify import VerifyReport, verify
from fastserial.config import Config
from fastserial.errors import (
    ConfigError,
    ConvertError,
    LoadMismatchError,
    UnreadableCheckpointError,
    UnreadableTensorError,
)
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_directory

SMALL = Config(block_size=4096, queue_depth=3, threads=2)
WAYS = (DEFAULT, *FORCED.values())
pytestmark = pytest.mark.usefixtures("all_forced")
STORED, BZIP2 = zipfile.ZIP_STORED, zipfile.ZIP_BZIP2


def check(path: Path, data: bytes) -> VerifyReport:
    path.write_bytes(data)
    return verify(path, SMALL)


def loads(path: Path, is_verified: bool = True) -> bool:
    """Whether stock torch loads a file, and each of our ways gives the same."""
    want = both(lambda: torch.load(path), *WAYS)
    if want.error is None and is_verified:
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
    "digital signature": lambda: unusual()["digital signature"],
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_all_that_read_it_agree(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(ARCHIVES[name]())
    want = digest(state())
    assert loads(path)
    assert digest(fastserial.load(path)) == want
    for read in (opened, partial(filled, blank(state()))):
        if "deflated" in name and name in REWRITTEN:
            with pytest.raises((UnreadableTensorError, LoadMismatchError), match="compressed"):
                read(path)
        else:
            assert digest(read(path)) == want
    report = verify(path, SMALL)
    closed = name in ("added: bzip2", "added: lzma")  # a record that neither torch nor we can read
    assert report.status == ("unchecked" if closed else "ok"), report
    assert report.fully_checked is not closed
    assert report.checked_bytes
    assert verify(spoiled(path), SMALL).status == "damaged"


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


# -- other archives ------------------------------------------------------------------------------


def _package(path: Path) -> None:
    from torch.package import PackageExporter

    with PackageExporter(str(path)) as file:
        file.save_pickle("model", "model.pkl", {"x": torch.ones(3000)})


OTHERS: dict[str, Callable[[Path], object]] = {
    "npz": lambda path: np.savez(path, a=np.arange(3000), b=np.zeros(3)),
    "npz, compressed": lambda path: np.savez_compressed(path, a=np.arange(3000), b=np.zeros(3)),
    "package": _package,
    "exported": lambda path: torch.export.save(
        torch.export.export(torch.nn.Linear(30, 40), (torch.randn(2, 30),)), path
    ),
    "script": lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(30, 40)), path),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_archives(name: str, tmp_path: Path) -> None:
    """Whole, but no checkpoint; torch.load takes scripts, and so do we."""
    path = tmp_path / ("x.npz" if "npz" in name else "x.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        OTHERS[name](path)
    report = verify(path, SMALL)
    assert (report.status, report.problems) == ("ok" if name == "script" else "unreadable", [])
    assert report.checked_bytes
    if name != "script":
        assert any("whole archive, but no checkpoint" in note for note in report.notes)
        with pytest.raises(ConvertError, match=rf"{path.name}: .*no data\.pkl"):
            fastserial.convert(path, tmp_path / "t")
        assert os.listdir(tmp_path) == [path.name]
    report = verify(spoiled(path), SMALL)
    assert report.status == "damaged"
    assert "npz" not in name or report.problems[0].record == "/a.npy"


def test_two_records_of_one_name(tmp_path: Path) -> None:
    """Torch's reader takes one of them: tools that need to know which refuse the file."""
    path = tmp_path / "x.pt"
    body = bytes(state()["w"].flip(0).numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path.write_bytes(appended(checkpoint(), ("archive/data/0", body, STORED)))
    assert loads(path, is_verified=False)
    with pytest.raises(ConfigError, match=r"not compared: .*several"):
        fastserial.load(path, verify=True)
    for read in (opened, partial(filled, blank(state()))):
        with pytest.raises(UnreadableCheckpointError, match=r"several .*: use torch\.load"):
            read(path)
    shown = fastserial.inspect(path)
    assert {tensor.key for tensor in shown.tensors} == state().keys()
    assert [name for name, _, _ in shown.records].count("data/0") == 2
    assert shown.notes == ("several records have the name data/0, and differ",)
