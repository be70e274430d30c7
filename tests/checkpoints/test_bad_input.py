"""What cannot be saved, and where it cannot be saved: stock's exceptions, and no damage.

Every expectation about an exception comes from running stock in the same test.
"""

from __future__ import annotations

import io
import os
import signal
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.beside import Gate
from support.corpus import CASES, FORMATS, noise
from support.identity import TARGETS, both, fast, raised, save, stock
from support.others import as_user

import fastserial

OLD = b"the previous checkpoint" * 5000
_NOBODY = 65534
SIDES: dict[str, Callable[..., AbstractContextManager[None]]] = {"stock": stock, "fast": fast}
# In blocks, or small and buffered: both ways end in the same rename.
WAYS: list[dict[str, Any]] = [{}, {"small_file": 0, "block_size": 4096}]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
both_formats = pytest.mark.parametrize("fmt", FORMATS)


def assert_like(got: BaseException | None, want: BaseException | None) -> None:
    """Who catches ``want`` also catches ``got``."""
    assert (got is None) == (want is None), (got, want)
    assert want is None or isinstance(got, type(want)), (got, want)


def still_saves(folder: Path, fmt: str) -> None:
    """No writer, lock or buffer stayed behind."""
    both(CASES["none"], fmt, TARGETS["path"], folder)


@pytest.fixture(autouse=True)
def _after() -> Iterator[None]:
    """Nothing but the tests below changes the umask, and stock is back afterwards."""
    mask = os.umask(0o022)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    os.umask(mask)
    with stock():
        pass


# --- paths that cannot be written, and things that are not files ------------------------------

PLACES = {
    "missing directory": "{}/missing/a.pt",
    "missing directories": "{}/missing/too/a.pt",
    "directory": "{}/directory",
    "file as parent": "{}/plain/a.pt",
    "empty": "",
    "directory with slash": "{}/directory/",
    "new name with slash": "{}/new/",
    "dot": "{}/.",
    "no stem": "{}/.hidden",
    "name too long": "{}/" + "n" * 300 + ".pt",
    "path too long": "{}/" + "d/" * 3000 + "a.pt",
    "null byte": "{}/a\0b.pt",
    "links in a circle": "{}/loop1",
    "link into nowhere": "{}/astray",
    "link to a directory": "{}/door",
    "device without space": "/dev/full",
}
# Places whose refusal must say the path; torch's own words are kept for the others.
MUST_NAME = ("missing", "directory", "file as", "name too long", "path too", "link")
LINKS = {"loop1": "loop2", "loop2": "loop1", "astray": "missing/a.pt", "door": "directory"}


def _sink(write: Any = len, flush: Any = lambda: None) -> Any:
    """What is no file, but has its methods."""
    return SimpleNamespace(write=write, flush=flush)


class _BytesPath:
    def __fspath__(self) -> bytes:
        return b"bytes.pt"

    def __str__(self) -> str:  # torch 2.6 uses this
        return "bytes.pt"


def _raiser(error: BaseException) -> Callable[..., object]:
    def raises(*data: object) -> object:
        raise error

    return raises


def _closed(folder: Path) -> Any:
    with open(folder / "closed", "wb") as file:
        pass
    return file


def _read_only(folder: Path) -> Any:
    (folder / "read-only").write_bytes(OLD)
    return open(folder / "read-only", "rb")


THINGS: dict[str, Callable[[Path], Any]] = {
    "None": lambda d: None,
    "descriptor": lambda d: 1,
    "bytes": lambda d: os.fsencode(d / "bytes.pt"),
    "object": lambda d: object(),
    "path of bytes": lambda d: _BytesPath(),
    "no flush": lambda d: SimpleNamespace(write=len),
    "write raises OSError": lambda d: _sink(_raiser(OSError(28, "full"))),
    "write raises KeyboardInterrupt": lambda d: _sink(_raiser(KeyboardInterrupt())),
    "write returns None": lambda d: _sink(lambda data: None),
    "flush raises": lambda d: _sink(flush=_raiser(OSError(5, "flush failed"))),
    "text stream": lambda d: io.StringIO(),
    "closed file": _closed,
    "read-only file": _read_only,
    "text file": lambda d: open(d / "text", "w"),  # noqa: SIM115
    "full device": lambda d: open("/dev/full", "wb", buffering=0),  # noqa: SIM115
    "full device, buffered": lambda d: open("/dev/full", "wb"),  # noqa: SIM115
    "read end of a pipe": lambda d: os.fdopen(os.pipe()[0], "rb"),
}


@both_formats
@pytest.mark.parametrize("name", [*PLACES, *THINGS])
def test_what_cannot_be_written(
    name: str, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock's type of exception, and nothing left behind; of things that torch writes, its text."""
    errors, left = {}, {}
    for side, context in SIDES.items():
        folder = tmp_path / side
        (folder / "directory").mkdir(parents=True)
        (folder / "plain").touch()
        for link, points in LINKS.items():
            (folder / link).symlink_to(points)
        monkeypatch.chdir(folder)
        f = PLACES[name].format(folder) if name in PLACES else THINGS[name](folder)
        with context():
            errors[side] = raised(save, f, fmt)
        if isinstance(f, io.IOBase):
            raised(f.close)
        left[side] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    assert_like(errors["fast"], errors["stock"])
    assert left["fast"] == left["stock"]
    if name in THINGS:
        said = [str(error).replace(str(tmp_path / side), "") for side, error in errors.items()]
        assert said[0] == said[1]
    elif name.startswith(MUST_NAME) and not f.endswith("/"):
        assert f in str(errors["fast"]) or getattr(errors["fast"], "filename", None) == f
    if isinstance(errors["stock"], OSError):
        assert getattr(errors["fast"], "errno", None) == errors["stock"].errno
    still_saves(tmp_path / "after", fmt)


# --- not root ---------------------------------------------------------------------------------
# Modes of the directory and of the file in it (None: no file).
SCENES: dict[str, tuple[int, int | None]] = {
    "unwritable directory": (0o555, None),
    "unsearchable directory": (0o666, 0o666),
    "read-only file": (0o777, 0o444),
    "someone else's file": (0o777, 0o644),
    # Stock opens and overwrites. A temporary file beside it is not possible,
    "writable file in unwritable directory": (0o555, 0o666),
    # would change the owner,
    "someone else's writable file": (0o777, 0o666),
    # or may not be renamed over it.
    "sticky directory": (0o1777, 0o666),
}


def tried(path: str, fmt: str) -> list[Any]:
    error = raised(save, path, fmt)
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return [kinds, str(error), getattr(error, "errno", None)]


def files_in(folder: Path) -> dict[str, Any]:
    found = {}
    for file in folder.iterdir():
        status = file.stat()
        owner = status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)
        found[file.name] = owner, file.read_bytes()
    return found


@needs_root
@both_formats
@pytest.mark.parametrize("scene", SCENES)
def test_permissions(scene: str, fmt: str, tmp_path: Path) -> None:
    """As another user: refused where stock is refused, written where stock writes."""
    directory_mode, file_mode = SCENES[scene]
    outcomes, files = {}, {}
    tmp_path.chmod(0o711)
    for side, context in SIDES.items():
        folder = tmp_path / side
        folder.mkdir()
        if file_mode is not None:
            (folder / "a.pt").write_bytes(OLD)
            (folder / "a.pt").chmod(file_mode)
        folder.chmod(directory_mode)
        with context():
            for warm in ("warm.pt", "missing/warm.pt"):  # what both outcomes import
                raised(save, tmp_path / warm, fmt)
            outcomes[side] = as_user(partial(tried, f"{side}/a.pt", fmt), tmp_path, _NOBODY)
        files[side] = files_in(folder)
    (want, _, want_errno), (kinds, message, errno) = outcomes["stock"], outcomes["fast"]
    assert want[0] in kinds, message
    assert files["fast"] == files["stock"]
    if want[0] != "NoneType":
        assert want_errno in (None, errno)
        assert "fast/a.pt" in message
        assert all(data == OLD for _, data in files["fast"].values())


# --- a save that fails leaves the previous file -----------------------------------------------

FAILING = [name for name, case in CASES.items() if case.raises.keys() == set(FORMATS)]


@both_formats
@pytest.mark.parametrize("name", FAILING)
def test_failed_save(name: str, fmt: str, tmp_path: Path) -> None:
    """The previous file stays byte for byte, nothing else lies beside it."""
    case, path = CASES[name], tmp_path / "a.pt"
    live, options = case.build(), case.options(fmt)
    with stock():
        want = raised(lambda: torch.save(live, path, **options))
    assert isinstance(want, case.raises[fmt])
    path.write_bytes(OLD)
    path.chmod(0o640)
    before = path.stat()
    for way in WAYS:
        with fast(**way):
            got = raised(lambda: torch.save(live, path, **options))
        assert_like(got, want)
        assert str(got) == str(want)
        assert os.listdir(tmp_path) == ["a.pt"]
        assert path.read_bytes() == OLD
        after = path.stat()
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    still_saves(tmp_path / "after", fmt)


# --- threads and processes --------------------------------------------------------------------


def test_fork_while_another_thread_saves(tmp_path: Path) -> None:
    """The child can save, the parent's save is not disturbed."""
    want, gate = {"t": noise(1_000_000)}, Gate()
    options = {"engine": gate.engine, "small_file": 0, "block_size": 65536, "queue_depth": 1}

    def run() -> None:
        with fastserial.options(**options):
            save(tmp_path / "parent.pt", "zip", want)

    with fast(durable=False, small_file=0, block_size=65536):
        thread = threading.Thread(target=run)
        thread.start()
        assert gate.stopped.wait(60)
        child = os.fork()
        if not child:
            signal.alarm(30)
            os._exit(raised(save, tmp_path / "child.pt", "zip", want) is not None)
        assert os.waitpid(child, 0)[1] == 0
        gate.open.set()
        thread.join()
    for name in ("child.pt", "parent.pt"):
        assert torch.equal(torch.load(tmp_path / name)["t"], want["t"])
    assert sorted(os.listdir(tmp_path)) == ["child.pt", "parent.pt"]
