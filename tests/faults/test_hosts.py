"""Hosts that share a folder, where locks are each host's own: no file is torn, none is lost."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from mounts import Lab, need
from states import listing
from support import processes

from fastserial.files.temporary import owner_of

pytestmark = pytest.mark.timeout(300)

_NBYTES = 4 << 20
_NAMESPACES = "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Host:
    """Sees the folder by a mount of its own, and has its own boot ID and processes."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.folder = lab.local_locks(folder)
        self._boot_id = lab.folder / f"{self.folder.name}.boot_id"
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        self._stack = ExitStack()

    def save(self, byte: int, guard: str = "on") -> Save:
        """Start to save so many bytes of this value."""
        found = Save(self, byte, guard)
        self._stack.callback(found.kill)
        return found

    def command(self, *words: object) -> list[str]:
        script = f'mount --bind {self._boot_id} {_BOOT_ID} && exec "$@"'
        return processes.command(*words, under=[*_NAMESPACES, "sh", "-c", script, "sh"])

    def close(self) -> None:
        self._stack.close()


class Save:
    """A save that goes step by step."""

    def __init__(self, host: Host, byte: int, guard: str) -> None:
        program = processes.program("host")
        path = host.folder / "x.pt"
        self._process = subprocess.Popen(
            host.command(program, path, byte, _NBYTES, guard),
            env=processes.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def reaches(self, step: str) -> None:
        """Wait until a step is done."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.strip() == step, line + self._process.stderr.read()  # type: ignore[union-attr]

    def go_on(self) -> None:
        """Let it take the next step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> tuple[str, str]:
        """Return what it says once it has ended."""
        return self._process.communicate("\n\n", timeout=60)

    def kill(self) -> None:
        """End it at once; `unshare` then kills what it started."""
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def hosts(lab: Lab) -> Iterator[tuple[Host, Host]]:
    need("unshare", "bindfs")
    folder = lab.folder / "shared"
    folder.mkdir()
    with ExitStack() as stack:
        made = Host(lab, folder), Host(lab, folder)
        for one in made:
            stack.callback(one.close)
        yield made


def collide(hosts: tuple[Host, Host], guard: str) -> tuple[bytes, str]:
    """Save from both; one is killed when half is written. Return the file, and what is said."""
    target = hosts[0].folder / "x.pt"
    target.write_bytes(b"old")
    first = hosts[0].save(1, guard)
    first.reaches("opened")
    first.go_on()
    first.reaches("half written")
    second = hosts[1].save(2, guard)
    second.reaches("opened")
    second.go_on()
    second.reaches("half written")
    second.kill()
    time.sleep(0.2)
    said, _ = first.end()
    return target.read_bytes(), said


def test_another_host_is_killed(hosts: tuple[Host, Host]) -> None:
    """Its half file is not taken for ours, nor ours for a leftover."""
    found, said = collide(hosts, "on")
    assert found == b"\1" * _NBYTES
    assert "durable=1" in said
    folder = hosts[0].folder
    (left,) = set(listing(folder)) - {"x.pt"}
    assert owner_of(left) is not None
    save(hosts[0], 3)
    assert set(listing(folder)) == {"x.pt", left}, "its host may be alive"
    a_day_ago = time.time() - 86500
    os.utime(folder / left, (a_day_ago, a_day_ago))
    save(hosts[0], 4)
    assert listing(folder) == ["x.pt"]


def save(host: Host, byte: int) -> None:
    said, errors = host.save(byte).end()
    assert said.splitlines()[-1].startswith("saved"), errors
    assert (host.folder / "x.pt").read_bytes() == bytes([byte]) * _NBYTES


def test_another_host_removes_the_new_file(hosts: tuple[Host, Host]) -> None:
    """A host that does not know our names, or whose clock is wrong: the old file stays."""
    (hosts[0].folder / "x.pt").write_bytes(b"old")
    saving = hosts[0].save(1)
    saving.reaches("opened")
    saving.go_on()
    saving.reaches("half written")
    (name,) = set(listing(hosts[1].folder)) - {"x.pt"}
    (hosts[1].folder / name).unlink()
    _, errors = saving.end()
    assert "another program or host removed the new file" in errors
    assert "the previous file is intact" in errors
    assert (hosts[0].folder / "x.pt").read_bytes() == b"old"


def test_numbers_and_locks_would_tear_the_file(hosts: tuple[Host, Host]) -> None:
    """The control: a half file, that is said to be durable."""
    found, said = collide(hosts, "off")
    assert found == b"\2" * (_NBYTES // 2)
    assert "durable=1" in said
