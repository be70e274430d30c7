"""What ranks meet besides states: unusual targets, groups, dtypes, other processes, long jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support import processes, ranks

ANYBODY = ("new", "private", "link", "hanging_link", "held", "not_durable")
OTHERS = ("others", "unwritable", "append_only")


def test_targets(tmp_path: Path) -> None:
    out = ranks.run("ranks_targets", 2, tmp_path, *ANYBODY, timeout=100)
    assert out == ["".join(f"{name}\n" for name in ANYBODY)] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: owners and flags of files")
def test_targets_of_others(tmp_path: Path) -> None:
    missing = [tool for tool in ("setfacl", "chattr") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (packages acl, e2fsprogs)")
    if subprocess.run(["lsattr", "-d", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no flags (chattr)")
    out = ranks.run("ranks_targets", 2, tmp_path, *OTHERS, timeout=100)
    assert out == ["".join(f"{name}\n" for name in OTHERS)] * 2


@pytest.mark.parametrize("case", ["groups", "growth", "dtypes"])
def test_long(case: str, tmp_path: Path) -> None:
    ranks.run("ranks_long", 4, tmp_path, case, timeout=200)


def test_what_differs_between_ranks_is_no_file(tmp_path: Path) -> None:
    ranks.run("ranks_differ", 3, tmp_path, timeout=200)


def test_loads_while_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    other = processes.start(processes.program("replacing"), path)
    try:
        until = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < until, "no file comes"
            time.sleep(0.01)
        ranks.run("ranks_long", 3, tmp_path, "replaced", timeout=100)
    finally:
        other.kill()
        other.communicate()
