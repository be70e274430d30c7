"""The Linux calls that Python has no function for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastserial.files import linux


def test_kind_of(tmp_path: Path) -> None:
    link = tmp_path / "a link to it"
    link.symlink_to("/proc/self")
    assert linux.kind_of("/proc") == linux.kind_of(str(link)) == "proc"
    assert linux.kind_of(str(tmp_path)) not in ("", "unknown", "proc")
    assert linux.kind_of(str(tmp_path / "missing")) == "unknown"


def test_kind_of_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads any folder")
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    assert linux.kind_of(str(folder)) == linux.kind_of(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "options", "found"),
    [
        ("btrfs", {}, False),
        ("btrfs", {"compress": "none"}, False),
        ("btrfs", {"compress": "zstd:3"}, True),
        ("btrfs", {"compress-force": "lzo"}, True),
        ("zfs", {}, True),
        ("bcachefs", {}, True),
        ("overlay", {"upperdir": "/"}, False),
        ("tmpfs", {"compress": "zstd"}, False),
    ],
)
def test_which_mounts_compress(
    kind: str, options: dict[str, str], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/faults/test_compression.py` has real ones."""
    monkeypatch.setattr(linux, "mounted_as", lambda fd: (kind, options))
    fd = os.memfd_create("x")  # on no block device
    try:
        assert linux.compresses(fd) is found
    finally:
        os.close(fd)
