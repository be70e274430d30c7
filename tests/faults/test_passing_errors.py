"""A network file system that fails for a moment: the save is repeated as a whole."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import Lab
from states import listing
from support.identity import last_save

import fastserial

pytestmark = pytest.mark.timeout(300)

STATE: dict[str, Any] = {"weights": torch.arange(3 << 20), "step": 7}  # 24 MiB: by the engine
SMALL: dict[str, Any] = {"weights": torch.arange(1000), "step": 7}


class Failing:
    """A folder whose calls fail as `fail` says."""

    def __init__(self, lab: Lab) -> None:
        self._told = lab.folder / "below.fails"
        self.fail("write", "EIO", 0)
        self.where = lab.mirror_of_below("--failing")

    def fail(self, call: str, name: str, count: int) -> None:
        """Let a call fail so many times from now on."""
        self._told.write_text(f"{call} {name} {count}")

    @property
    def left(self) -> int:
        """How often it is still to fail."""
        return int(self._told.read_text().split()[2])


@pytest.fixture
def failing(lab: Lab) -> Failing:
    return Failing(lab)


@pytest.mark.parametrize("call", ["create", "write", "fsync", "rename"])
def test_the_save_is_repeated(
    call: str, failing: Failing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # torch's own writer, which small files have, would take the errors of writes
    options: dict[str, Any] = {"small_file": 0} if call == "write" else {}
    path = failing.where / "x.pt"
    for name in ("EIO", "ESTALE", "ETIMEDOUT"):
        state = SMALL if name == "ESTALE" else STATE
        fastserial.uninstall()
        torch.save(state, tmp_path / "x.pt")
        fastserial.install(**options)
        torch.save({"old": 1}, path)
        failing.fail(call, name, 2)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fastserial"):
            torch.save(state, path)
        assert failing.left == 0
        assert path.read_bytes() == (tmp_path / "x.pt").read_bytes()
        assert listing(failing.where) == ["x.pt"]
        assert "the save is repeated in 0.5 s" in caplog.text
        assert "the save was repeated after an error" in str(last_save().fallback)


def test_a_save_in_the_background_is_repeated(failing: Failing) -> None:
    fastserial.install()
    failing.fail("write", "ESTALE", 2)
    fastserial.save_async(STATE, failing.where / "x.pt").wait()
    assert torch.equal(torch.load(failing.where / "x.pt")["weights"], STATE["weights"])


@pytest.mark.parametrize(("name", "seconds"), [("ESTALE", 0), ("ESTALE", 2), ("EDQUOT", 2)])
def test_an_error_that_stays(name: str, seconds: int, failing: Failing) -> None:
    """The old file stays; what does not pass (no room) is raised at once."""
    path = failing.where / "x.pt"
    fastserial.install(retry_seconds=seconds)
    torch.save(SMALL, path)
    old = path.read_bytes()
    failing.fail("write", name, 1000)
    began = time.perf_counter()
    with pytest.raises(fastserial.WriteError, match="the previous file is intact") as caught:
        torch.save(STATE, path)
    assert caught.value.errno == getattr(errno, name)
    assert (time.perf_counter() - began > 1) is (name == "ESTALE" and seconds > 0)
    assert path.read_bytes() == old
    assert listing(failing.where) == ["x.pt"]
