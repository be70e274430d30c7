"""Whether a record is a whole pickle."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from fastserial.checkpoints.verify.purpose import is_whole_pickle
from fastserial.formats.zip.directory import read_directory


@pytest.mark.parametrize(
    ("pickle", "whole"),
    [
        (b"\x80\x02]q\x00.", True),
        (b"\x80\x02]q\x00", False),
        (
            b"\x80\x02c\\q\nname\n.",
            False,
        ),  # Python warns of such an escape: an error in these tests
        (b"", False),
        (b"of another module", True),
    ],
)
def test_pickles(tmp_path: Path, pickle: bytes, whole: bool) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle)
    fd = os.open(path, os.O_RDONLY)
    try:
        record = read_directory(fd, path.stat().st_size).records[0]
        assert is_whole_pickle(fd, record) is whole
    finally:
        os.close(fd)
