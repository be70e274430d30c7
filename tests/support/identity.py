"""Save one live object with stock torch and with fastserial, and compare all that can be seen.

``FASTSERIAL_IDENTITY_STOCK_ONLY=1`` makes both sides stock: then every difference is a fault of
this harness.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import hashlib
import io
import os
import stat
import subprocess
import tempfile
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.corpus import Case

SMALL = {"x": torch.arange(1000.0)}
STOCK_ONLY = os.environ.get("FASTSERIAL_IDENTITY_STOCK_ONLY", "0") != "0"


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """torch as it came."""
    if not STOCK_ONLY:
        import fastserial

        fastserial.uninstall()
        assert not fastserial.installed()
    yield


@contextlib.contextmanager
def fast(**options: Any) -> Iterator[None]:
    """torch with fastserial installed."""
    if STOCK_ONLY:
        yield
        return
    import fastserial

    fastserial.install()
    try:
        assert fastserial.installed()
        with _options(options):
            yield
    finally:
        fastserial.uninstall()


def _options(options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    if STOCK_ONLY:
        return contextlib.nullcontext()
    import fastserial

    return fastserial.options(**options)


def save(f: Any, fmt: str, live: Any = SMALL) -> None:
    """`torch.save` in the format `zip` or `legacy`."""
    torch.save(live, f, _use_new_zipfile_serialization=fmt == "zip")


def saved(folder: Path, live: Any, fmt: str = "zip", name: str = "f.pt", **options: Any) -> Path:
    """A file that stock wrote."""
    with stock():
        torch.save(live, folder / name, _use_new_zipfile_serialization=fmt == "zip", **options)
    return folder / name


def stock_bytes(live: Any, fmt: str = "zip", **options: Any) -> bytes:
    """What stock writes into memory."""
    buffer = io.BytesIO()
    with stock():
        torch.save(live, buffer, _use_new_zipfile_serialization=fmt == "zip", **options)
    return buffer.getvalue()


def last_save() -> Any:
    """The `SaveReport` of what was saved last."""
    import fastserial

    report = fastserial.last_save_report()
    assert report is not None
    return report


def raised(call: Callable[..., object], *arguments: Any) -> BaseException | None:
    """What a call raises, interrupts included."""
    try:
        call(*arguments)
    except BaseException as error:
        error.__traceback__ = None
        return error
    return None


# --- targets ----------------------------------------------------------------------------------

Save = Callable[[Any], None]


@dataclass(frozen=True)
class Seen:
    """What lies in a target after a save, and what its file object says."""

    data: bytes
    position: int | None = None
    extra: Any = None


Target = Callable[[Path, Save], Seen]
TARGETS: dict[str, Target] = {}
HEAD, TAIL, BEHIND = b"head of the file", b"tail", b"b" * 30_000


def target(name: str) -> Callable[[Target], Target]:
    """Register a way to hand a target to ``torch.save``; it gets an empty folder."""

    def register(function: Target) -> Target:
        TARGETS[name] = function
        return function

    return register


def _mode(path: str | os.PathLike[str]) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def _path_target(name: str, spell: Callable[[Path], Any], file: str = "archive.pt") -> None:
    """``spell`` turns the file's path into what the caller passes."""

    def run(folder: Path, save: Save) -> Seen:
        path = folder / file
        with _chdir(folder):
            save(spell(path))
        return Seen(path.read_bytes(), extra=_mode(path))

    TARGETS[name] = run


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class _Fspath:
    """A path that is neither ``str`` nor ``Path``."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:  # what torch 2.6 asks for
        return self.path


_path_target("path", str)
_path_target("path_pathlib", Path)
_path_target("path_fspath", lambda p: _Fspath(str(p)))
_path_target("path_relative_dots", lambda p: f"./../{p.parent.name}/{p.name}")
for _name, _file in {
    "no_extension": "no_ext",
    "hidden": ".hidden.pt",
    "percent": "%s {0} %d.pt",
    "newline": "new\nline.pt",
    "not_utf8": os.fsdecode(b"bytes-\xff\xfe.pt"),
    "long_name": "n" * 251 + ".pt",  # a temporary name must not be longer than the final one
    "like_a_temp_file": "archive.pt.tmp",
}.items():
    _path_target(f"path_{_name}", str, _file)


def _overwriting(size: int) -> Target:
    def run(folder: Path, save: Save) -> Seen:
        path = folder / "archive.pt"
        path.write_bytes(b"x" * size)
        path.chmod(0o640)
        save(str(path))
        return Seen(path.read_bytes(), extra=_mode(path))

    return run


TARGETS["path_over_longer_file"] = _overwriting(30 << 20)
TARGETS["path_over_shorter_file"] = _overwriting(3)


@target("path_in_place_of_own_file")
def _(folder: Path, save: Save) -> Seen:
    path = folder / "archive.pt"
    save(path)
    save(path)
    return Seen(path.read_bytes())


# A link stays, what it points to changes; the archive is named after the link.
_LINKS = {
    "relative": {"archive.pt": "real/step.pt"},
    "dangling": {"archive.pt": "real/new.pt"},
    "chain": {"archive.pt": "b.pt", "b.pt": "real/c.pt", "real/c.pt": "../real/step.pt"},
    "dangling_chain": {"archive.pt": "b.pt", "b.pt": "real/new.pt"},
    "absolute": {"archive.pt": "{}/real/step.pt"},
    "beside": {"archive.pt": "./step-7.pt"},
    "through_a_linked_directory": {"door": "real", "archive.pt": "door/step.pt"},
}


def _link_target(links: Mapping[str, str]) -> Target:
    def run(folder: Path, save: Save) -> Seen:
        (folder / "real").mkdir()
        (folder / "real" / "step.pt").write_bytes(BEHIND)
        for name, points in links.items():
            (folder / name).symlink_to(points.format(folder))
        save(str(folder / "archive.pt"))
        left = [os.readlink(folder / name) == links[name].format(folder) for name in links]
        return Seen((folder / "archive.pt").read_bytes(), extra=left)

    return run


TARGETS |= {f"link_{name}": _link_target(links) for name, links in _LINKS.items()}


@target("path_fifo")
def _(folder: Path, save: Save) -> Seen:
    os.mkfifo(folder / "archive.pt")
    with _reader(folder / "archive.pt", folder / "copy"):
        save(str(folder / "archive.pt"))
    is_fifo = stat.S_ISFIFO(os.stat(folder / "archive.pt").st_mode)
    return Seen((folder / "copy").read_bytes(), extra=is_fifo)


@contextlib.contextmanager
def _reader(source: Any, copy: Path) -> Iterator[None]:
    """Another process drains a pipe: stock holds the GIL while it writes to one."""
    with open(copy, "wb") as out:
        child = subprocess.Popen(
            ["cat", *([source] if isinstance(source, Path) else [])],
            stdin=None if isinstance(source, Path) else source,
            stdout=out,
        )
    try:
        yield
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()


Opener = Callable[[Path], Any]


def _file_target(name: str, opener: Opener, *, before: bytes = b"", tell: bool = True) -> None:
    """A file object: its position after the save, and what a later write does to the file."""

    def run(folder: Path, save: Save) -> Seen:
        path = folder / "file.bin"
        if before:
            path.write_bytes(before)
        with opener(path) as file:
            save(file)
            position = file.tell() if tell else None
            file.write(TAIL)
        return Seen(path.read_bytes(), position, _mode(path))

    TARGETS[name] = run


def _at(position: int) -> Callable[[Any], Any]:
    def move(file: Any) -> Any:
        file.seek(position)
        return file

    return move


def _after_write(file: Any) -> Any:
    file.write(HEAD)  # stays in Python's buffer
    return file


def _after_read(file: Any) -> Any:
    assert file.read(7) == BEHIND[:7]  # the descriptor is further than the position now
    return file


def _open(mode: str, buffering: int = -1) -> Opener:
    return lambda path: open(path, mode, buffering)


def _opened(adjust: Callable[[Any], Any], mode: str, buffering: int = -1) -> Opener:
    return lambda path: adjust(open(path, mode, buffering))


_file_target("file", _open("wb"))
_file_target("file_unbuffered", _open("wb", 0))
_file_target("file_read_write", _open("w+b"))
_file_target("file_append_new", _open("ab"))
_file_target("file_append", _open("ab"), before=BEHIND)
_file_target("file_pending_write", _opened(_after_write, "wb"))
_file_target("file_middle", _opened(_at(13), "r+b"), before=BEHIND)
_file_target("file_middle_after_read", _opened(_after_read, "r+b"), before=BEHIND)
_file_target("file_beyond_end", _opened(_at(10_001), "wb"))
_file_target("fsspec", lambda p: _fsspec(p))


def _fsspec(path: Path, **options: Any) -> Any:
    import pytest  # the compat scripts run without it

    local = pytest.importorskip("fsspec.implementations.local")
    return local.LocalFileSystem().open(str(path), "wb", **options)


class _HashingFile(io.FileIO):
    """A real file that must see every byte: no way around its ``write``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return super().write(data)


class _Wrapped:
    """Passes all on to a file, ``fileno`` included, and watches the writes, as tqdm does."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.sizes: list[int] = []

    def write(self, data: Any) -> int:
        self.sizes.append(memoryview(data).nbytes)
        return self.file.write(data)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Minimal:
    """The least that torch takes; keeps a log of its calls."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.log: list[Any] = []

    def write(self, data: Any) -> int:
        self.parts.append(bytes(data))
        self.log.append((type(data).__name__, len(self.parts[-1])))
        return len(self.parts[-1])

    def flush(self) -> None:
        self.log.append("flush")


@target("file_subclass_hashing")
def _(folder: Path, save: Save) -> Seen:
    with _HashingFile(folder / "file.bin") as file:
        save(file)
        position = file.tell()
    return Seen((folder / "file.bin").read_bytes(), position, file.crc)


@target("file_wrapped")
def _(folder: Path, save: Save) -> Seen:
    with open(folder / "file.bin", "wb") as inner:
        file = _Wrapped(inner)
        save(file)
        position = inner.tell()
    return Seen((folder / "file.bin").read_bytes(), position, file.sizes)


@target("file_two_saves")
def _(folder: Path, save: Save) -> Seen:
    with open(folder / "file.bin", "wb") as file:
        save(file)
        middle = file.tell()
        save(file)
        return Seen((folder / "file.bin").read_bytes(), file.tell(), middle)


@target("named_temporary_file")
def _(folder: Path, save: Save) -> Seen:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        save(file)
        position = file.tell()
        file.flush()
        return Seen(Path(file.name).read_bytes(), position)


@target("bytesio")
def _(folder: Path, save: Save) -> Seen:
    buffer = io.BytesIO()
    save(buffer)
    return Seen(buffer.getvalue(), buffer.tell())


@target("minimal")
def _(folder: Path, save: Save) -> Seen:
    file = _Minimal()
    save(file)
    return Seen(b"".join(file.parts), None, file.log)


class _TheirWriter(_Minimal):
    """Has the method of DeepSpeed's `FastFileWriter`, too."""

    def save_torch_storage_object_list(self, storage_obj_list: Any, save_size: bool) -> int:
        before = len(b"".join(self.parts))
        for storage, dtype in storage_obj_list:
            if save_size:
                self.parts.append((storage.nbytes() // dtype.itemsize).to_bytes(8, "little"))
            self.parts.append(storage_bytes(storage))
        return len(b"".join(self.parts)) - before


@target("their_writer")
def _(folder: Path, save: Save) -> Seen:
    file = _TheirWriter()
    save(file)
    return Seen(b"".join(file.parts))


@target("pipe")
def _(folder: Path, save: Save) -> Seen:
    out, into = os.pipe()
    with os.fdopen(out), _reader(out, folder / "copy"), os.fdopen(into, "wb") as file:
        save(file)
    return Seen((folder / "copy").read_bytes())


@target("path_of_descriptor")
def _(folder: Path, save: Save) -> Seen:
    # A path that names an open file: that file takes the bytes, not a new one in its place.
    with open(folder / "file.bin", "w+b") as file:
        save(f"/dev/fd/{file.fileno()}")
        return Seen(file.read())


# --- what a save leaves -----------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one save left behind."""

    seen: Seen | None
    error: BaseException | None
    files: tuple[str, ...]
    warnings: frozenset[tuple[str, str]]


def attempt(target: Target, folder: Path, save: Callable[[Any], None], expected: Any) -> Outcome:
    """Run a save into a target inside an empty folder; ``expected`` errors are caught, too."""
    folder.mkdir(parents=True)
    seen = error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen = target(folder, save)
        except BaseException as raised:
            # A real Ctrl-C must still end the test run.
            if not isinstance(raised, (Exception, *_types(expected))):
                raise
            error = raised
            # Frames would keep half-pickled objects alive.
            error.__traceback__ = None
    files = tuple(sorted(str(p.relative_to(folder)) for p in folder.rglob("*")))
    # Of options that are not met there are warnings of ours: `test_wishes.py`.
    messages = frozenset(
        (w.category.__name__, str(w.message))
        for w in caught
        if w.category.__name__ != "UnmetOptionWarning"
    )
    return Outcome(seen, error, files, messages)


def _types(expected: Any) -> tuple[type[BaseException], ...]:
    if expected is None:
        return ()
    return expected if isinstance(expected, tuple) else (expected,)


def difference(left: bytes, right: bytes) -> str | None:
    """Where two byte strings part, in words; ``None`` if they do not."""
    if left == right:
        return None
    size = min(len(left), len(right))
    a, b = np.frombuffer(left, np.uint8, size), np.frombuffer(right, np.uint8, size)
    at = int(np.argmax(a != b)) if (a != b).any() else size
    return f"{len(left)} and {len(right)} bytes, which differ first at {at} (0x{at:x})"


def compare(want: Outcome, got: Outcome, *, addresses: bool = True) -> None:
    """Assert that ``got`` is what stock's ``want`` is.

    Args:
        addresses: whether a legacy file's keys must be the same; not so where pickling itself
            makes new storages.
    """
    if want.error is not None:
        assert got.error is not None, f"stock raised {want.error!r}, the other side nothing"
        assert isinstance(got.error, type(want.error)), (want.error, got.error)
        # Stock leaves a broken file; nothing beyond it may stay.
        assert set(got.files) <= set(want.files), got.files
        return
    if got.error is not None:
        raise AssertionError(f"stock raised nothing, the other side {got.error!r}") from got.error
    assert want.seen is not None
    assert got.seen is not None
    if addresses:
        parted = difference(want.seen.data, got.seen.data)
        assert parted is None, f"stock and the other side: {parted}"
        assert got.seen.position == want.seen.position
        assert got.seen.extra == want.seen.extra
    else:
        assert legacy_value(got.seen.data) == legacy_value(want.seen.data)
    assert got.files == want.files
    # Stock may warn once per process only: so no new ones, rather than the same ones.
    assert got.warnings <= want.warnings, got.warnings - want.warnings


def legacy_value(data: bytes) -> str:
    """A hash of what a legacy file holds, for files whose keys, which are addresses, differ."""
    return digest(torch.load(io.BytesIO(data), weights_only=False))


# --- values -----------------------------------------------------------------------------------

_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range, slice)
# Sharing of other objects is chance: constants, caches.
_SHARED = (list, dict, set, torch.Tensor, np.ndarray)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    """A copy of a storage's bytes."""
    if storage.device.type != "cpu":
        storage = storage.cpu()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


class _Digester:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.heartbeat: list[Any] = []  # so that no id is given twice

    def say(self, *words: object) -> None:
        self.hash.update(repr(words).encode("utf-8", "surrogatepass"))

    def storage(self, storage: torch.UntypedStorage) -> None:
        self.heartbeat.append(storage)
        if storage.device.type == "meta":
            self.say("storage", str(storage.device), storage.nbytes())
        elif not storage.nbytes():  # releases differ in whether they share these on reading
            self.say("empty storage")
        elif storage._cdata in self.storages:
            self.say("same storage", self.storages[storage._cdata])
        else:
            self.storages[storage._cdata] = len(self.storages)
            if storage.device.type != "cpu":
                self.say("on", str(storage.device))
            self.say("storage", storage.nbytes())
            self.hash.update(storage_bytes(storage))

    def any(self, value: Any) -> None:
        if isinstance(value, torch.TypedStorage):
            if value.dtype is not torch.uint8:  # stock reads an untyped one back as such
                self.say("typed", str(value.dtype))
            self.storage(value._untyped_storage)
        elif isinstance(value, torch.UntypedStorage):
            self.storage(value)
        elif isinstance(value, _ATOMS) and type(value).__module__ == "builtins":
            self.say(type(value).__name__, value)
        elif isinstance(value, _NAMED):
            self.say(value.__module__, value.__qualname__)
        elif not isinstance(value, _SHARED):
            self.heartbeat.append(value)
            self.compound(value)
        elif id(value) in self.seen:
            self.say("again", self.seen[id(value)])
        else:
            self.seen[id(value)] = len(self.seen)
            self.heartbeat.append(value)
            self.compound(value)

    def compound(self, value: Any) -> None:
        self.say(type(value).__qualname__)
        if isinstance(value, torch.Tensor):
            self.say(str(value.dtype), str(value.layout), str(value.device), value.requires_grad)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.say(value.dtype.descr, value.shape, value.tobytes())
        elif isinstance(value, torch.Generator):
            self.any(value.get_state())
        elif type(value) in (list, tuple):
            self.all(value)
        elif type(value) in (set, frozenset):
            self.say(sorted(digest(item) for item in value))
        elif type(value) is dict:
            self.all(value.items())
        else:
            # What pickle would write: the constructor, its arguments, state, items; of a tensor the
            # storage, the place in it, and what else tells of it.
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce else value.__reduce_ex__(2)
            if isinstance(parts, str):
                self.say(parts)
            else:
                self.all(parts[:3])
                for items in parts[3:5]:
                    self.all(items or ())

    def all(self, values: Iterable[Any]) -> None:
        for item in values:
            self.say("next")
            self.any(item)
        self.say("end")


def digest(value: Any) -> str:
    """A hash of a value: types, numbers, strides, storage bytes, which storages are shared."""
    digester = _Digester()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        digester.any(value)
    return digester.hash.hexdigest()


# --- one comparison ---------------------------------------------------------------------------


def saver(case: Case, fmt: str, live: Any) -> Callable[[Any], None]:
    """``torch.save`` of this object as the case says."""

    def save(f: Any) -> None:
        with case.context():
            torch.save(live, f, **case.options(fmt))

    return save


def both(
    case: Case,
    fmt: str,
    target: Target,
    folder: Path,
    *option_sets: Mapping[str, Any],
    live: Any = None,
    odd: type[BaseException] | None = None,
) -> list[Outcome]:
    """Save with stock, with fastserial under each set of options, with stock again: all agree.

    The last one proves that the bytes are reproducible and that fastserial left the object alone.

    Args:
        odd: what stock raises for this target, though the case itself can be saved.

    Returns:
        what stock left behind, then what fastserial did.
    """
    expected = odd or case.raises.get(fmt)
    live = case.build() if live is None else live
    addresses = not (fmt == "legacy" and case.fresh_storages)

    def one(side: str) -> Outcome:
        return attempt(target, folder / side, saver(case, fmt, live), expected)

    with stock():
        want = one("stock")
        if expected is not None:
            assert isinstance(want.error, expected), f"{case.name}: {want.error!r}"
        elif want.error is not None:
            raise AssertionError(f"{case.name}: stock raised") from want.error
    outcomes = [want]
    with fast():
        for number, options in enumerate(option_sets or ({},)):
            with _options(options):
                got = one(f"fast{number}")
            try:
                compare(want, got, addresses=addresses)
                if want.error is not None:
                    # These fail in pickling, which is torch's own on both sides.
                    assert str(got.error) == str(want.error)
            except AssertionError as error:
                note = f"{case.name}, {fmt}, options {dict(options)}: {error}"
                raise AssertionError(note) from error
            outcomes.append(got)
    with stock():
        compare(want, one("again"), addresses=addresses)
    return outcomes
