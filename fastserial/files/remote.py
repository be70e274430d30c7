"""Folders that are not local: a bucket's prefix, or any URL that fsspec opens.

obstore moves the bytes where it knows the scheme (`s3`, `gs`, `az`, `file`): parts in parallel, and
each is tried again if it fails. It downloaded five times as fast as s3fs, and uploaded as fast (a
local S3 server, 25 November 2026). fsspec opens all other URLs. Both read endpoints and credentials
from the environment, such as `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from fastserial.errors import ConfigError, RemoteError

_T = TypeVar("_T")
_CHUNK = 8 * 1024 * 1024
_CONCURRENT = 4  # parts under way; with `_CHUNK` some 32 MiB of memory
_MOST_PARTS = 9_000  # S3 takes 10,000 for one object
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

    def chunks(self, name: str) -> Iterator[bytes]:
        """Return the bytes of an object, some MiB at a time.

        Raises:
            FileNotFoundError: there is none of this name.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that do not exist are ignored."""


def remote_folder(url: str, timeout: float) -> RemoteFolder:
    """Return the folder at a URL; no request is made yet.

    Args:
        timeout: for so many seconds a request that fails is tried again (obstore).

    Raises:
        ConfigError: the URL cannot be opened, or a package is missing; says which.
    """
    try:
        if urlsplit(url).scheme in _OBSTORE_SCHEMES:
            with contextlib.suppress(ModuleNotFoundError):
                return _ObstoreFolder(url, timeout)
        return _FsspecFolder(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be opened: {error}. For s3, gs and az URLs: "
            "pip install 'fastserial[remote]'"
        ) from error


class _ObstoreFolder:
    def __init__(self, url: str, timeout: float) -> None:
        """Open it.

        Raises:
            ModuleNotFoundError: obstore is not installed.
            ValueError: the URL or its configuration is not valid.
        """
        import obstore
        from obstore.exceptions import BaseError

        self.url = url
        self._obstore = obstore
        self._errors = (BaseError, OSError)
        retry = {"max_retries": 1_000, "retry_timeout": timedelta(seconds=timeout)}
        local = urlsplit(url).scheme == "file"
        options: dict[str, Any] = {"mkdir": True} if local else {"retry_config": retry}
        try:
            self._store: Any = obstore.store.from_url(url, **options)
        except self._errors as error:
            raise ValueError(_first_line(error)) from error

    def _try(self, what: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except FileNotFoundError:
            raise
        except self._errors as error:
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

    def chunks(self, name: str) -> Iterator[bytes]:
        what = f"{name} cannot be read"
        found = self._try(what, lambda: self._obstore.get(self._store, name))
        pieces = iter(found.stream(min_chunk_size=_CHUNK))
        while piece := self._try(what, lambda: next(pieces, None)):
            yield bytes(piece)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
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
        except Exception as error:  # each of fsspec's packages has its own
            raise RemoteError(f"{self.url}: {what}: {_first_line(error)}") from error

    def sizes(self) -> dict[str, int]:
        with self._named("cannot be listed"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._path(""))
            return {path[start:]: entry["size"] for path, entry in found.items()}

    def put(self, name: str, chunks: Iterable[bytes], nbytes: int) -> None:
        with self._named(f"{name} cannot be written"):
            self._files.makedirs(self._root, exist_ok=True)
            with self._files.open(self._path(name), "wb") as file:
                for chunk in chunks:
                    file.write(chunk)

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._named(f"{name} cannot be read"), self._files.open(self._path(name)) as file:
            while piece := file.read(_CHUNK):
                yield piece

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with (
                self._named(f"{name} cannot be removed"),
                contextlib.suppress(FileNotFoundError),
            ):
                self._files.rm_file(self._path(name))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
