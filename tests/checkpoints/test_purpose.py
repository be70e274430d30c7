"""Whether a record is a whole pickle."""

from __future__ import annotations

import io
import zipfile

import pytest

from fastserial.checkpoints.verify.purpose import is_whole_pickle
from fastserial.formats.source import BytesSource
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
def test_pickles(pickle: bytes, whole: bool) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/data.pkl", pickle)
    source = BytesSource(out.getvalue())
    assert is_whole_pickle(source, read_directory(source).records[0]) is whole
