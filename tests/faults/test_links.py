"""Mounts that do not follow links, and a file system without a free inode: as stock."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from mounts import Lab, need
from support.identity import fast, stock

import fastserial

pytestmark = pytest.mark.timeout(300)

_STATE = {"x": torch.arange(1000.0)}


@pytest.mark.parametrize("use_zip", [True, False])
def test_links_on_a_mount_that_does_not_follow_them(use_zip: bool, lab: Lab) -> None:
    """They may be another user's trap; what they point to stays as it is."""
    need()
    folder = lab.mount("none", "tmpfs", "nosymfollow")
    victim = lab.folder / "victim.pt"
    victim.write_bytes(b"old")
    (folder / "a.pt").symlink_to(victim)
    (folder / "b.pt").symlink_to(lab.folder / "new.pt")
    for name in ("a.pt", "b.pt"):
        with stock(), pytest.raises((OSError, RuntimeError)):
            torch.save(_STATE, folder / name, _use_new_zipfile_serialization=use_zip)
        with fast(), pytest.raises(fastserial.WriteError) as caught:
            torch.save(_STATE, folder / name, _use_new_zipfile_serialization=use_zip)
        assert caught.value.errno == errno.ELOOP
        assert str(folder / name) in str(caught.value)
        assert os.path.islink(folder / name)
    assert victim.read_bytes() == b"old"
    assert not (lab.folder / "new.pt").exists()


@pytest.mark.parametrize("use_zip", [True, False])
def test_no_inode_is_free(use_zip: bool, lab: Lab) -> None:
    """The old file stays, a new name is refused, and nothing is left."""
    need("mkfs.ext4", "losetup")
    folder = lab.make("ext4", 32 << 20, mkfs=["-N", "32"])
    path = folder / "a.pt"
    path.write_bytes(b"old")
    count = 0
    with pytest.raises(OSError, match="No space"):
        for count in range(1000):
            (folder / f"{count}").touch()
    for name in ("a.pt", "new.pt"):
        for way in ({}, {"small_file": 0}):
            with fast(**way), pytest.raises(fastserial.WriteError) as caught:
                torch.save(_STATE, folder / name, _use_new_zipfile_serialization=use_zip)
            assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert len(os.listdir(folder)) == count + 2  # and lost+found
