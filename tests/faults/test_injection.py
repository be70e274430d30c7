"""Every kind of system call on a save's path fails, at its first, a middle and its last call.

strace puts the error in place of the call, in whichever thread makes it. Short writes come from
a preloaded library, for strace can only pretend them.

Blocks go to whichever thread is free: one may make fewer calls than in the run that was counted,
so that some injections never happen. At least `_SHARE` of them must.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounts import need, run
from states import check, is_whole, listing
from support.traced_calls import attached
from victims import DURABLE, Victim, Zygote

pytestmark = pytest.mark.timeout(3600)

# Calls that allocate memory, run threads or tell the test: their failure says nothing of a save.
_LEFT_ALONE = frozenset(
    "brk clone clone3 clock_nanosleep exit exit_group futex getpid getrandom gettid madvise mmap "
    "mprotect mremap munmap poll rseq rt_sigprocmask rt_sigreturn rt_sigtimedwait sched_yield "
    "sched_getaffinity set_robust_list set_tid_address tgkill kill write restart_syscall "
    "prctl sysinfo getcpu getuid geteuid getgid getegid umask "
    "lseek writev".split()  # torch's stream over the null device cannot be made to fail cleanly
)
_ERRORS = {
    "pwrite64": ("EIO", "ENOSPC", "EDQUOT", "EINVAL", "EINTR", "EFBIG"),
    "fallocate": ("EIO", "ENOSPC", "EDQUOT", "EOPNOTSUPP", "EINTR"),
    "fsync": ("EIO", "ENOSPC", "ESTALE", "EINVAL"),
    "openat": ("EIO", "EROFS", "ENOSPC", "ESTALE", "EMFILE", "EOPNOTSUPP"),
    "linkat": ("EIO", "EROFS", "ENOSPC", "EDQUOT", "ENOENT", "EEXIST"),
    "rename": ("EIO", "EROFS", "ENOSPC", "ESTALE", "EACCES"),
    "renameat": ("EIO", "EROFS", "ENOSPC", "ESTALE", "EACCES"),
    "renameat2": ("EIO", "EROFS", "ENOSPC", "ESTALE", "EACCES"),
    "listxattr": ("EIO", "EACCES", "EOPNOTSUPP"),
    "llistxattr": ("EIO", "EACCES", "EOPNOTSUPP"),
    "flistxattr": ("EIO", "EACCES", "EOPNOTSUPP"),
    "flock": ("EIO", "ENOLCK", "EOPNOTSUPP", "EAGAIN"),
}
# Where such an error must end the save.
_MATTERS = frozenset("pwrite64 fallocate fsync linkat rename renameat".split())
_FATAL = frozenset("EIO ENOSPC EDQUOT EFBIG EROFS ESTALE EACCES".split())
# But for a link that something refuses: the bytes are copied to a file that has a name.
_REFUSED_LINK = ("linkat", "EROFS")
_SHARE = 0.7
_LINE = re.compile(r"^(\d+)\s+(\w+)\(")


@contextlib.contextmanager
def traced(victim: Victim, *words: str) -> Iterator[None]:
    """Attach strace to a paused victim for the `with` block, at whose end the victim is gone."""
    victim.await_line("ready")
    with attached([victim.pid], words, victim.folder / "calls", victim.folder / "strace"):
        yield


def calls_of(victim: Victim) -> dict[str, int]:
    """Return, for each system call, how often the thread that makes it most makes it."""
    with traced(victim):
        victim.resume()
        assert victim.wait() == 0, victim.lines()
    text = (victim.folder / "calls").read_text(errors="replace")
    counts = Counter(match.groups() for match in map(_LINE.match, text.splitlines()) if match)
    most: dict[str, int] = {}
    for (_, call), count in counts.items():
        most[call] = max(most.get(call, 0), count)
    return {call: count for call, count in most.items() if call not in _LEFT_ALONE}


def cases(most: dict[str, int]) -> list[tuple[str, int, str]]:
    return [
        (call, when, error)
        for call, count in sorted(most.items())
        for when in sorted({1, (count + 1) // 2, count})
        for error in _ERRORS.get(call, ("EIO",))
    ]


@pytest.fixture(scope="module")
def plan(
    tmp_path_factory: pytest.TempPathFactory, zygote: Zygote
) -> list[tuple[str, str, int, str]]:
    """Save once in every way; return (job, call, which of them, error) for all that may fail."""
    need("strace", root=False)
    plan = []
    for name, job in DURABLE.items():
        path = tmp_path_factory.mktemp("plan") / "x.pt"
        assert zygote.start(path, 1, 1, **job).wait() == 0
        most = calls_of(zygote.start(path, 2, 1, pause=True, **job))
        assert "fsync" in most
        assert ("fallocate" in most) is (name not in ("small", "buffered")), name
        plan += [(name, *case) for case in cases(most)]
    return plan


def outcome_of(
    zygote: Zygote,
    path: Path,
    victim: Victim,
    status: int,
    old: bytes,
    job: dict[str, Any],
    injected: str,
) -> str:
    """Check what a victim left, save once more, and say how it ended."""
    left = set(listing(path.parent)) - {path.name}
    if status == 3:
        error = victim.told("error")
        kinds = error["kinds"]
        assert {"WriteError", "OSError", "RuntimeError"} <= set(kinds), (injected, error)
        assert error["filename"] == str(path), (injected, error)
        if "in place" in error["text"]:
            assert check(path) == 2
            outcome = "errors after the new file was in place"
        else:
            assert path.read_bytes() == old, injected
            outcome = "errors, old file intact"
        if not injected.startswith("unlink"):
            assert not left, (injected, left)
    else:
        assert status == 0, (injected, status, victim.lines())
        assert check(path) == 2, injected
        outcome = "saves that succeeded, new file whole"
    again = zygote.start(path, 3, 1, **job)
    assert again.wait() == 0, (injected, again.lines())
    assert listing(path.parent) == [path.name], injected
    assert check(path) == 3
    return outcome


def overwrite(
    zygote: Zygote, path: Path, job: dict[str, Any], call: str, injection: str
) -> tuple[Victim, int, bytes]:
    """Save over a checkpoint, with something injected into a system call.

    Returns:
        The process, its exit status, and the bytes of the old file.
    """
    path.unlink(missing_ok=True)
    assert zygote.start(path, 1, 1, **job).wait() == 0
    old = path.read_bytes()
    victim = zygote.start(path, 2, 1, pause=True, **job)
    with traced(victim, f"--inject={call}:{injection}", f"--trace={call}"):
        victim.resume()
        return victim, victim.wait(), old


@pytest.mark.trials(12, 100_000)
def test_errors(
    plan: list[tuple[str, str, int, str]],
    tmp_path: Path,
    zygote: Zygote,
    dice: random.Random,
    counts: Counter[str],
    trials: int,
) -> None:
    failures: list[str] = []
    chosen = dice.sample(plan, min(trials, len(plan)))
    hits = 0
    for name, call, when, error in chosen:
        job, path = DURABLE[name], tmp_path / "x.pt"
        injected = f"{call} {when}: {error} ({name})"
        victim, status, old = overwrite(zygote, path, job, call, f"error={error}:when={when}")
        try:
            outcome = outcome_of(zygote, path, victim, status, old, job, injected)
        except AssertionError as error:
            failures.append(f"{injected}: {error}")
            continue
        happened = "INJECTED" in (victim.folder / "calls").read_text(errors="replace")
        hits += happened
        counts[outcome if happened else "never reached that call"] += 1
        is_fatal = call in _MATTERS and error in _FATAL and (call, error) != _REFUSED_LINK
        if is_fatal and happened and not outcome.startswith("errors"):
            failures.append(f"{injected}: went unseen")
    assert not failures, "\n\n".join(failures)
    assert hits >= _SHARE * len(chosen)


@pytest.mark.parametrize("injection", ["error=EIO", "signal=KILL"])
def test_injections_tear_what_is_overwritten(
    injection: str, tmp_path: Path, zygote: Zygote
) -> None:
    """The control: without a new file the old one is gone, and the new one is not whole."""
    need("strace", root=False)
    path, job = tmp_path / "x.pt", {"nbytes": 12 << 20, "unguarded": True}
    path.touch()
    assert zygote.start(path, 1, 1, **job).wait() == 0
    victim = zygote.start(path, 2, 1, pause=True, **job)
    with traced(victim, f"--inject=pwrite64:{injection}:when=1"):
        victim.resume()
        status = victim.wait()
    assert status == (3 if injection.startswith("error") else -9), victim.lines()
    assert not is_whole(path)


@pytest.mark.trials(6, 100_000)
def test_kills(
    plan: list[tuple[str, str, int, str]],
    tmp_path: Path,
    zygote: Zygote,
    dice: random.Random,
    counts: Counter[str],
    trials: int,
) -> None:
    calls = sorted({case[:3] for case in plan})
    chosen = dice.sample(calls, min(trials, len(calls)))
    hits = 0
    for name, call, when in chosen:
        job, path = DURABLE[name], tmp_path / "x.pt"
        _, status, _ = overwrite(zygote, path, job, call, f"signal=KILL:when={when}")
        if status == 0:
            counts["never reached that call"] += 1
            assert check(path) == 2
        else:
            assert status == -9
            hits += 1
            counts["new file whole" if check(path) == 2 else "old file whole"] += 1
        assert zygote.start(path, 3, 1, **job).wait() == 0
        assert listing(path.parent) == [path.name], (name, call, when)
        assert check(path) == 3
    assert hits >= _SHARE * len(chosen)


class ShortWrites:
    """A zygote whose victims' writes can be cut short."""

    def __init__(self, folder: Path) -> None:
        need("gcc", root=False)
        self._control = folder / "control"
        self._control.write_bytes(bytes(16))
        library = folder / "shortwrite.so"
        source = Path(__file__).with_name("shortwrite.c")
        run("gcc", "-shared", "-fPIC", "-O", "-o", library, source, "-ldl")
        self.zygote = Zygote({"LD_PRELOAD": str(library), "SHORTWRITE": str(self._control)})

    def set(self, at: int, keep: int) -> None:
        """Cut call number `at` to `keep` bytes."""
        with self._control.open("r+b") as file:
            os.pwrite(file.fileno(), struct.pack("4i", at, keep, 0, 0), 0)

    @property
    def calls(self) -> int:
        """Writes since `set`."""
        return int(struct.unpack("4i", self._control.read_bytes())[2])

    @property
    def cuts(self) -> int:
        """Writes cut short since `set`."""
        return int(struct.unpack("4i", self._control.read_bytes())[3])


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShortWrites]:
    made = ShortWrites(tmp_path_factory.mktemp("short"))
    with made.zygote:
        yield made


@pytest.mark.trials(8, 200)
def test_short_writes(
    tmp_path: Path, short: ShortWrites, dice: random.Random, counts: Counter[str], trials: int
) -> None:
    folder = tmp_path / "saves"
    folder.mkdir()
    path, zygote = folder / "x.pt", short.zygote
    hits = 0
    for trial in range(trials):
        job = list(DURABLE.values())[trial % len(DURABLE)]
        path.unlink(missing_ok=True)
        short.set(0, 0)
        assert zygote.start(path, 1, 1, **job).wait() == 0
        old, count = path.read_bytes(), short.calls
        assert count > 0
        at = (1, (count + 1) // 2, count, dice.randint(1, count))[trial // len(DURABLE) % 4]
        keep = dice.choice([1, 7, 512, 4096, 0, -1, -512])
        short.set(at, keep)
        victim = zygote.start(path, 2, 1, **job)
        status = victim.wait()
        hits += short.cuts
        injected = f"call {at} cut to {keep}"
        counts[outcome_of(zygote, path, victim, status, old, job, injected)] += 1
    assert hits >= _SHARE * trials


@pytest.mark.parametrize("deaf", [False, True])
def test_a_short_write_that_nobody_hears_of(deaf: bool, tmp_path: Path, short: ShortWrites) -> None:
    """The control: where the length that was written is not looked at, the file is not whole."""
    path = tmp_path / "x.pt"
    assert short.zygote.start(path, 1, 1, nbytes=12 << 20).wait() == 0
    short.set(2, 0)
    assert short.zygote.start(path, 2, 1, nbytes=12 << 20, deaf=deaf).wait() == 0
    assert short.cuts == 1
    assert is_whole(path) is not deaf
