"""Background saves of eight ranks in a control group: no copies that the node has no memory for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ranks

_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1
_RANKS = 8
_STATE = 4 << 30

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.environ.get("FASTSERIAL_DISTRIBUTED") != "full", reason="takes 6 GiB: the long form only"
    ),
    pytest.mark.skipif(
        not os.access(_GROUPS, os.W_OK), reason="needs the control group memory (version 1)"
    ),
]


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose limit is one and a half times the state."""
    place = _GROUPS / f"fastserial-test-{os.getpid()}"
    place.mkdir()
    try:
        (place / "memory.limit_in_bytes").write_text(str(_STATE * 3 // 2))
        yield place
    finally:
        with contextlib.suppress(OSError):  # a process that is being killed is still in it
            place.rmdir()


def test_no_rank_is_killed(group: Path, tmp_path: Path) -> None:
    words = ("limited", tmp_path, group / "cgroup.procs", _STATE, "-")
    out = ranks.run("ranks_resources", _RANKS, *words)
    assert [len(text.split()) for text in out] == [3] * _RANKS


def test_control_without_that_limit(group: Path, tmp_path: Path) -> None:
    words = ("limited", tmp_path, group / "cgroup.procs", _STATE, 2 * _STATE)
    assert -9 in {end.code for end in ranks.Job("ranks_resources", _RANKS, *words).wait()}
