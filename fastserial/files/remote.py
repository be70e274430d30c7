"""Folders and files that are not local: in a bucket, or at any URL that fsspec opens.

obstore moves the bytes where it knows the scheme (`s3`, `gs`, `az`, `file`): parts in parallel, and
each is tried again if it fails. It downloaded five times as fast as s3fs, and uploaded as fast (a
local S3 server, 25 November 2026). fsspec opens all other URLs. Both read endpoints and credentials
from the environment, such as `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from threading import Event
from time import monotonic
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from fastserial.errors import (
    ConfigError,
    CorruptCheckpointError,
    RemoteError,
    TruncatedCheckpointError,
)
from fastserial.interrupts import ours, suppress

_T = TypeVar("_T")
_CHUNK = 8 * 1024 * 1024
_CONCURRENT = 4  # parts under way; with `_CHUNK` some 32 MiB of memory
_PIECE = 64 * 1024  # of a part, taken at once as it arrives
_TIMEOUT = 60.0  # seconds without a byte for which a request to read is tried again,
_ONE_CALL = 2.0  # by calls of so many: Python sees Ctrl-C between two calls, or pieces, only
_MOST_PARTS = 9_000  # S3 takes 10,000 for one object
# What fsspec's packages call the tag of an object, or the time at which it was written.
_TAGS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "Last-Modified", "created")
_OBSTORE_SCHEMES = {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file"}


class RemoteFolder(Protocol):
    """Objects under one URL, by their names below it.

    Each method raises `RemoteError` if the store still fails after it was tried again.

        folder = remote_folder("s3://bucket/run", timeout=60.0)
        folder.put("note.txt", [b"ten ", b"bytes."], 10)
        assert folder.sizes() == {"note.txt": 10}

    Attributes:
        url: of the folder.
    """

    url: str

    def sizes(self) -> dict[str, int]:
        """Return the size of each object (bytes) by its name."""

    def put(self, name: str, chunks: Iterable[bytes], nbytes: int) -> None:
        """Write an object of `nbytes` bytes, or replace one.

        After an error the object is the old one, or missing; fsspec may leave a part of it.
        """

    def status(self, name: str) -> tuple[int, Any]:
        """Return an object's size (bytes), and what another content changes: a tag, or the time.

        Raises:
            FileNotFoundError: there is none of this name.
        """

    def read(self, name: str, offset: int, nbytes: int) -> Iterator[bytes]:
        """Return some bytes of an object, in pieces as they arrive.

        Raises:
            FileNotFoundError: there is none of this name.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that do not exist are ignored."""


def remote_folder(url: str, timeout: float, *, create: bool = False) -> RemoteFolder:
    """Return the folder at a URL; no request is made yet.

    Args:
        timeout: for so many seconds a request that fails is tried again (obstore).
        create: it is to be written: make a directory that a `file` URL names.

    Raises:
        ConfigError: the URL cannot be opened, or a package is missing; says which.
        FileNotFoundError: the directory that a `file` URL names is missing.
    """
    try:
        if urlsplit(url).scheme in _OBSTORE_SCHEMES:
            with suppress(ModuleNotFoundError):
                return _ObstoreFolder(url, timeout, create)
        return _FsspecFolder(url)
    except ours(ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be opened: {error}. For s3, gs and az URLs: "
            "pip install 'fastserial[remote]'"
        ) from error


class _ObstoreFolder:
    def __init__(self, url: str, timeout: float, create: bool) -> None:
        """Open it.

        Raises:
            ModuleNotFoundError: obstore is not installed.
            FileNotFoundError: a directory is missing.
            ValueError: the URL or its configuration is not valid.
        """
        import obstore
        from obstore.exceptions import BaseError

        self.url = url
        self._obstore = obstore
        self._errors: tuple[type[Exception], ...] = (BaseError, OSError)
        retry = {"max_retries": 1_000, "retry_timeout": timedelta(seconds=timeout)}
        self._is_local = local = urlsplit(url).scheme == "file"
        options: dict[str, Any] = {"mkdir": create} if local else {"retry_config": retry}
        try:
            self._store: Any = obstore.store.from_url(url, **options)
        except ours(*self._errors) as error:
            if local and not os.path.isdir(unquote(urlsplit(url).path)):
                raise _not_found(url) from error
            raise ValueError(_first_line(error)) from error

    def _try(self, what: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except FileNotFoundError:
            raise
        except ours(*self._errors) as error:
            raise RemoteError(f"{self.url}: {what}: {_first_line(error)}") from error

    def sizes(self) -> dict[str, int]:
        def listed() -> dict[str, int]:
            pages = self._obstore.list(self._store)
            return {found["path"]: found["size"] for page in pages for found in page}

        return self._try("cannot be listed", listed)

    def put(self, name: str, chunks: Iterable[bytes], nbytes: int) -> None:
        size = max(_CHUNK, -(-nbytes // _MOST_PARTS))
        data = b"".join(chunks) if nbytes <= size else iter(chunks)
        options = {"chunk_size": size, "max_concurrency": _CONCURRENT}
        self._try(
            f"{name} cannot be written",
            lambda: self._obstore.put(self._store, name, data, **options),
        )

    def status(self, name: str) -> tuple[int, Any]:
        found = self._try(f"{name} cannot be read", lambda: self._obstore.head(self._store, name))
        return int(found["size"]), found["e_tag"] or found["last_modified"]

    def read(self, name: str, offset: int, nbytes: int) -> Iterator[bytes]:
        def pieces() -> Iterator[Any]:
            if self._is_local:  # a stream of it has pieces of 8 KiB, and takes three times as long
                part = self._obstore.get_range(self._store, name, start=offset, length=nbytes)
                return iter([part])
            options = {"range": (offset, offset + nbytes)}
            found = self._obstore.get(self._store, name, options=options)
            return iter(found.stream(min_chunk_size=_PIECE))

        what = f"{name} cannot be read"
        found = self._try(what, pieces)
        while piece := self._try(what, lambda: next(found, None)):
            yield bytes(piece)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._try(f"{name} cannot be removed", lambda: self._obstore.delete(self._store, name))


class _FsspecFolder:
    def __init__(self, url: str) -> None:
        """Open it.

        Raises:
            ImportError: fsspec, or the package that it needs for this URL, is not installed.
            ValueError: no package knows the URL.
        """
        import fsspec

        self.url = url
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, RemoteError):
            raise
        except ours(Exception) as error:  # each of fsspec's packages has its own
            raise RemoteError(f"{self.url}: {what}: {_first_line(error)}") from error

    def sizes(self) -> dict[str, int]:
        with self._named("cannot be listed"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root, detail=True)
            except ours(FileNotFoundError):
                return {}
            start = len(self._path(""))
            return {path[start:]: entry["size"] for path, entry in found.items()}

    def put(self, name: str, chunks: Iterable[bytes], nbytes: int) -> None:
        with self._named(f"{name} cannot be written"):
            self._files.makedirs(self._root, exist_ok=True)
            with self._files.open(self._path(name), "wb") as file:
                for chunk in chunks:
                    file.write(chunk)

    def status(self, name: str) -> tuple[int, Any]:
        with self._named(f"{name} cannot be read"):
            self._files.invalidate_cache()
            found = self._files.info(self._path(name))
            if found["size"] is None or found.get("partial") is False:  # an HTTP server says so
                raise self._without_ranges(name)
            return int(found["size"]), next((found[key] for key in _TAGS if found.get(key)), None)

    def read(self, name: str, offset: int, nbytes: int) -> Iterator[bytes]:
        with self._named(f"{name} cannot be read"):
            found = self._files.cat_file(self._path(name), start=offset, end=offset + nbytes)
            if len(found) > nbytes:  # the whole file
                raise self._without_ranges(name)
        yield bytes(found)

    def _without_ranges(self, name: str) -> RemoteError:
        text = (
            "its server sends whole files only (it ignores Range): download it, and open the copy"
        )
        return RemoteError(f"{self.url}/{name}: {text}")

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with (
                self._named(f"{name} cannot be removed"),
                suppress(FileNotFoundError),
            ):
                self._files.rm_file(self._path(name))


def is_url(path: object) -> bool:
    """Return whether a path is a URL, such as `s3://bucket/run/model.pt`."""
    return isinstance(path, str) and "://" in path


class RemoteSource:
    """An object at a URL, which is read in ranges; those of a large one at the same time.

        source = RemoteSource("s3://bucket/run/model.pt")
        source.read_at(0, 4)

    Attributes:
        name: the URL.
        size: of the object (bytes).
    """

    def __init__(self, url: str, timeout: float | None = None) -> None:
        """Ask for its size.

        Args:
            timeout: seconds without a byte for which a request is tried again, by default a minute.

        Raises:
            FileNotFoundError: there is no such object.
            RemoteError: the store cannot be reached.
            ConfigError: as `remote_folder`, or the URL names no object.
        """
        scheme, _, path = url.partition("://")
        folder, slash, self._name = path.rpartition("/")
        if not self._name or (not slash and scheme in _OBSTORE_SCHEMES):
            raise ConfigError(f"{url}: names no file. A URL has the form s3://bucket/path/file")
        self.name = url
        self._pid = os.getpid()
        self._timeout = _TIMEOUT if timeout is None else timeout
        self._one_call = min(_ONE_CALL, self._timeout / 4)
        try:
            self._folder = remote_folder(f"{scheme}://{folder}", self._one_call)
        except ours(FileNotFoundError) as error:
            raise _not_found(url) from error
        self._status = self._ask_status()
        self.size = self._status[0]

    def _ask_status(self) -> tuple[int, Any]:
        return self._ask(lambda: self._folder.status(self._name), Event())

    def _ask(self, call: Callable[[], _T], stop: Event) -> _T:
        """Return what a call of the store returns.

        A call of obstore's that gave up, having tried for some time, is repeated. All other errors
        are final.

        Args:
            stop: set when the reader gave up.

        Raises:
            FileNotFoundError: there is no such object.
            RemoteError: the store refuses, or fails for `timeout` seconds.
        """
        until = monotonic() + self._timeout
        while True:
            began = monotonic()
            try:
                return call()
            except ours(FileNotFoundError) as error:
                raise _not_found(self.name) from error
            except ours(RemoteError):
                now = monotonic()
                gave_up = isinstance(self._folder, _ObstoreFolder) and now - began >= self._one_call
                if not gave_up or now > until or stop.is_set():
                    raise

    def is_changed(self) -> bool:
        """Return whether the object was replaced since it was opened; errors as of `read_at`."""
        return self._ask_status() != self._status

    def check_unchanged(self) -> None:
        """Raise if the object was replaced since it was opened.

        Raises:
            CorruptCheckpointError: it was.
            FileNotFoundError: it was removed.
            RemoteError: the store fails.
        """
        if self.is_changed():
            raise CorruptCheckpointError("it changed while it was read", path=self.name)

    def read_at(self, offset: int, nbytes: int, stop: Event | None = None) -> bytes:
        """Return `nbytes` bytes from `offset` on.

        Args:
            stop: set by another thread that does not want them any more.

        Raises:
            TruncatedCheckpointError: there are not as many.
            RemoteError: the store fails, or `stop` was set.
            ConfigError: this process was forked after the object was opened.
        """
        data = bytearray(max(0, nbytes))
        self.read_to(memoryview(data), offset, stop)
        return bytes(data)

    def read_to(self, view: memoryview, offset: int, stop: Event | None = None) -> None:
        """Fill host memory with the bytes from `offset` on, as `read_at`."""
        if os.getpid() != self._pid:  # without the store's threads no answer would come
            raise ConfigError(
                f"{self.name}: it was opened before this process was forked. Open it in this "
                'process, or start workers with "spawn"'
            )
        nbytes = len(view)
        if offset < 0 or offset + nbytes > self.size:
            raise TruncatedCheckpointError(f"the file ends at byte {self.size}: truncated")

        stop = stop or Event()

        def part(start: int) -> None:
            self._fill(view[start : start + _CHUNK], offset + start, stop)

        if nbytes <= _CHUNK:
            for start in range(0, nbytes, _CHUNK):
                part(start)
            return
        with ThreadPoolExecutor(_CONCURRENT) as threads:
            try:
                list(threads.map(part, range(0, nbytes, _CHUNK)))
            except BaseException:
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _fill(self, view: memoryview, offset: int, stop: Event) -> None:
        """Fill memory of at most a part; after an error, what is still missing is asked for."""
        done = 0

        def arrive() -> None:
            nonlocal done
            before = done
            try:
                for piece in self._folder.read(self._name, offset + done, len(view) - done):
                    view[done : done + len(piece)] = piece
                    done += len(piece)
                    if stop.is_set():
                        raise RemoteError(f"{self.name}: its reader gave up")
            except ours(RemoteError):
                if done == before or stop.is_set():
                    raise
            else:
                if done < len(view):
                    raise TruncatedCheckpointError("the file became shorter while it was read")

        while done < len(view):
            self._ask(arrive, stop)


class ReadAhead(io.RawIOBase):
    """A remote file that is read from front to back: the next parts are on their way.

    The eight parts used last stay, for a program that goes back a little, and the file's last part,
    which holds the directory of a zip.

    Attributes:
        failed: the first error of a read, which torch may replace by another one.
    """

    def __init__(self, source: RemoteSource, waiting: Callable[[], object] = bool) -> None:
        """Read nothing yet.

        Args:
            waiting: called about once a second while a part is awaited.
        """
        super().__init__()
        self._waiting = waiting
        self._source = source
        self.name, self.size = source.name, source.size
        self.failed: BaseException | None = None
        self._at = 0
        self._parts: dict[int, Future[bytes]] = {}  # by their number, the one used last at the end
        self._threads = ThreadPoolExecutor(_CONCURRENT)
        self._stop = Event()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        try:
            view = memoryview(buffer).cast("B")
            number, start = divmod(self._at, _CHUNK)
            if not view or self._at >= self.size:
                return 0
            if self.failed is not None:
                raise self.failed
            found = self._part(number)[start : start + len(view)]
            view[: len(found)] = found
            self._at += len(found)
            return len(found)
        except BaseException as error:
            self.failed = self.failed or error
            self._stop.set()
            raise

    def _part(self, number: int) -> memoryview:
        count = -(-self.size // _CHUNK)
        for wanted in range(number, min(number + _CONCURRENT, count)):
            part = self._parts.pop(wanted, None)
            if part is None:
                start = wanted * _CHUNK
                nbytes = min(_CHUNK, self.size - start)
                part = self._threads.submit(self._source.read_at, start, nbytes, self._stop)
            self._parts[wanted] = part
        for old in [one for one in self._parts if one != count - 1][: -2 * _CONCURRENT]:
            self._parts.pop(old).cancel()
        while not wait([self._parts[number]], timeout=1.0).done:
            self._waiting()
        return memoryview(self._parts[number].result())

    def close(self) -> None:
        if not self.closed:
            self._stop.set()
            self._parts.clear()
            self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()


def _not_found(url: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
