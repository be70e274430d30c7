"""Processes of a guest that save, forked from one that has imported torch (minutes, there)."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import states
import torch

import fastserial

NAME = "ckpt.pt"
NBYTES = 5 << 20
# Small enough for emulated processors, and yet several blocks, an engine, and reading ahead.
_SIZES: dict[str, Any] = {"small_file": 1 << 20, "block_size": 1 << 20}
PATIENCE = 150.0
_CLONE_NEWNS, _MS_BIND, _MS_REC_PRIVATE = 0x20000, 0x1000, 0x44000


class Torn(Exception):
    """A file that is neither the old checkpoint nor the new one."""


class Child:
    """A process that runs `work(say)`. What it says, and its end, arrive here as lines of JSON."""

    def __init__(
        self,
        work: Callable[..., object],
        *words: Any,
        stock: bool = False,
        host: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start it.

        Args:
            stock: without fastserial installed.
            host: a boot ID, to be taken for another host by.
            options: by name, of the work.
        """
        self._read, write = os.pipe()
        self._rest = b""
        self.said: list[dict[str, Any]] = []
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        try:
            os.close(self._read)

            def say(**found: Any) -> None:
                os.write(write, json.dumps(found).encode() + b"\n")

            try:
                if host is not None:
                    _be(host)
                if not stock:
                    fastserial.install(**_SIZES)
                say(end=work(say, *words, **(options or {})))
            except BaseException as error:
                number = getattr(error, "errno", None)
                where = traceback.format_exc(-3)
                say(error=type(error).__name__, errno=number, text=str(error), where=where)
        finally:
            os._exit(0)

    def _listen(self, seconds: float) -> bool:
        if not select.select([self._read], [], [], max(0.0, seconds))[0]:
            return True
        found = os.read(self._read, 1 << 16)
        *lines, self._rest = (self._rest + found).split(b"\n")
        self.said += map(json.loads, lines)
        return bool(found)

    def wait_for(self, word: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until it has said a line with this key, or an error."""
        end = time.monotonic() + seconds
        while True:
            for line in self.said:
                if word in line or "error" in line:
                    return line
            if time.monotonic() > end or not self._listen(end - time.monotonic()):
                self.kill()
                raise AssertionError(f"no {word!r} within {seconds} s: {self.said}")

    def ended(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait for its end, and return its last line: what it returned, or its error."""
        line = self.wait_for("end", seconds)
        self.kill()
        return line

    def kill(self) -> None:
        """Kill it, and read what it has said before."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        while self._listen(0.2):
            if not select.select([self._read], [], [], 0)[0]:
                break
        os.close(self._read)

    def last(self, word: str) -> int:
        """Return the last number said under this key, 0 if none was."""
        return max((line[word] for line in self.said if word in line), default=0)


def _be(boot: str) -> None:
    """Be a process of another host, as far as the kernel's boot ID tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = f"/run/boot-{os.getpid()}"
    Path(file).write_text(boot + "\n")
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0
    target = b"/proc/sys/kernel/random/boot_id"
    assert libc.mount(file.encode(), target, None, _MS_BIND, None) == 0


@functools.lru_cache(maxsize=4)
def stock_bytes(number: int, nbytes: int = NBYTES) -> bytes:
    """Return the file that stock torch makes of a checkpoint."""
    path = Path("/tmp/stock") / NAME
    path.parent.mkdir(exist_ok=True)
    torch.save(states.make(number, nbytes), path)
    return path.read_bytes()


def held(path: str | os.PathLike[str]) -> int:
    """Return the number of the checkpoint at a path, every byte of which is stock torch's.

    Raises:
        Torn: it is none.
    """
    try:
        found = torch.load(path, weights_only=True)
        number = int(found["number"])
        same = Path(path).read_bytes() == stock_bytes(number, found["nbytes"])
    except Exception as error:  # whatever torch says of half a file
        raise Torn(f"{path}: {type(error).__name__}: {error}") from error
    if not same:
        raise Torn(f"{path}: not the bytes of stock torch's checkpoint {number}")
    return number


def saves(
    say: Callable[..., None], path: str, first: int, count: int = 1, nbytes: int = NBYTES,
    go: str = "", **options: Any,
) -> list[str]:  # fmt: skip
    """Save checkpoints `first`, `first + 1`, ... and say so before and after each.

    Args:
        go: the first one waits until this file is there, and says that it is ready.
    """
    lines = []
    for number in range(first, first + count):
        state = states.make(number, nbytes)
        if go:
            say(ready=number)
            while not os.path.exists(go):
                time.sleep(0.002)
        say(start=number)
        if options:
            with fastserial.options(**options):
                torch.save(state, path)
        else:
            torch.save(state, path)
        report = fastserial.last_save_report()
        lines.append(summary(report))
        say(done=number, durable=report is not None and report.durable, report=lines[-1])
    return lines


def summary(report: fastserial.SaveReport | None) -> str:
    """Return what matters of a report."""
    if report is None or not report.bytes:
        return "by torch"
    reason = f", {report.fallback}" if report.fallback else ""
    return f"direct={report.direct:d} durable={report.durable:d}{reason}"


def kill_in_a_save(child: Child, dice: random.Random, seconds: float) -> None:
    """Kill it at a random moment after its first save has begun."""
    child.wait_for("start")
    time.sleep(dice.uniform(0, seconds))
    child.kill()


def strays(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of temporary files, and of those that NFS makes of removed open ones."""
    return [name for name in os.listdir(folder) if ".fastserial-" in name or name[:4] == ".nfs"]
