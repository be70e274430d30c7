"""The one file of all ranks, as a rank sees it that did not make it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastserial.distributed.save.shared_file import FileIdentity, OpenedFile
from fastserial.errors import WriteError


@pytest.fixture
def place(tmp_path: Path) -> FileIdentity:
    path = tmp_path / "x"
    path.write_bytes(bytes(10))
    return FileIdentity(str(path), path.stat().st_ino, 10)


def test_another_file_of_that_name_is_refused(place: FileIdentity) -> None:
    """As on a node that sees another file system there."""
    OpenedFile(place).close()
    for other in (place._replace(inode=place.inode + 1), place._replace(nbytes=11)):
        with pytest.raises(WriteError, match="all ranks have to see one file system"):
            OpenedFile(other)


def test_each_rank_syncs_what_it_wrote(
    place: FileIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = OpenedFile(place)
    synced: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", synced.append)
        file.sync()
    assert synced == [file.fd]
    file.close()
