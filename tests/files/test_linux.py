"""The Linux calls that Python has no function for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastserial.files import compression, linux
from fastserial.files.compression import Compression


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


_CACHE, _ANYHOW = Compression.THROUGH_CACHE, Compression.ANYHOW


@pytest.mark.parametrize(
    ("kind", "options", "flags", "found"),
    [
        ("btrfs", {}, 0, None),
        ("btrfs", {"compress": "none"}, 0, None),
        ("btrfs", {"compress": "zstd:3"}, 0, _CACHE),
        ("btrfs", {"compress": "zstd:3"}, 0x400, None),  # chattr +m
        ("btrfs", {"compress-force": "lzo"}, 0x400, _CACHE),
        ("btrfs", {"compress-force": "lzo"}, 0x800000, None),  # chattr +C
        ("zfs", {}, 0, _ANYHOW),
        ("bcachefs", {}, 0, _ANYHOW),
        ("overlay", {"upperdir": "/"}, 0, None),  # on itself, however often
        ("overlay", {}, 0, None),
        ("tmpfs", {"compress": "zstd"}, 0, None),
    ],
)
def test_which_mounts_compress(
    kind: str,
    options: dict[str, str],
    flags: int,
    found: Compression | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`tests/faults/test_compression.py` has real ones."""
    monkeypatch.setattr(compression, "mounted_as", lambda fd: (kind, options))
    monkeypatch.setattr(compression, "_flags", lambda fd: flags)
    fd = os.memfd_create("x")  # on no block device
    try:
        assert compression.compression_of(fd) is found
    finally:
        os.close(fd)
