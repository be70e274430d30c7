"""Exceptions and warnings.

Every error is a `FastserialError` and also the builtin that stock torch raises in the same
situation, so existing `except` clauses keep working.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple


class FastserialError(Exception):
    """Base of everything fastserial raises on purpose."""


class ConfigError(FastserialError, ValueError):
    """An option has an unknown name or an impossible value."""


class PatchError(FastserialError, ImportError):
    """The installed torch cannot be patched (`install(strict=True)` only)."""


class EngineError(FastserialError, RuntimeError):
    """An I/O engine was used against its contract."""


class EngineUnavailableError(EngineError, ImportError):
    """The engine asked for by name cannot run on this machine."""


class TransferAbandonedError(FastserialError, RuntimeError):
    """Another thread that moves awaited bytes failed; its own error has the cause."""


class LayoutError(FastserialError, RuntimeError):
    """A container cannot be laid out as asked."""


class CheckpointFileError(FastserialError, RuntimeError):
    """A file cannot be used as a checkpoint: it is damaged, or fastserial cannot read its format.

    A `RuntimeError`, as what `torch.load` raises for most damaged files.

    Attributes:
        path: the file, None where it is not known.
        record: the damaged record (zip) or storage (legacy), None if it is the container.
        offset: where in the file (bytes), None where it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        record: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.record = record
        self.offset = offset

    def __str__(self) -> str:
        parts = [self.path, f"record {self.record}" if self.record else None, self.message]
        return ": ".join(part for part in parts if part)


class CorruptCheckpointError(CheckpointFileError):
    """A checkpoint file is damaged."""


class TruncatedCheckpointError(CorruptCheckpointError):
    """A checkpoint file ends too early."""


class UnreadableCheckpointError(CheckpointFileError):
    """A file is no checkpoint, or has a format that fastserial does not read; it may be whole."""


class PickleLimitError(FastserialError, RuntimeError):
    """A pickle needs more memory or time to be read than the limits allow.

    Attributes:
        path: the file, None where it is not known.
    """

    path: str | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.path, super().__str__()) if part)


class CheckpointKeyError(FastserialError, KeyError):
    """A checkpoint holds no tensor of this key."""

    __str__ = Exception.__str__  # a `KeyError` would show its text in quotes


class UnreadableTensorError(FastserialError, RuntimeError):
    """A tensor cannot be read alone: only `torch.load` can make it."""


class LoadMismatchError(FastserialError, RuntimeError):
    """The targets and the checkpoint differ in keys, shapes or dtypes.

    Nothing was changed, unless the message says so.
    """


class UnknownPlacementError(LoadMismatchError):
    """It is unknown which part of a tensor a rank holds under a DTensor's placement."""


class CheckpointReplacedError(FastserialError, FileNotFoundError):
    """Another save removed a file of the folder during the load. Load again.

    A `FileNotFoundError` with `errno` and `filename`.
    """


class ConvertError(FastserialError, ValueError):
    """A checkpoint cannot be represented in the other format."""


class WriteError(FastserialError, OSError, RuntimeError):
    """A file could not be written.

    An `OSError` with `errno` and `filename`, and a `RuntimeError`, which is what stock
    `torch.save` raises for a path it cannot write. The previous file at the path is intact.

    Attributes:
        bytes_needed: for a full disk or quota: size of the file, as far as it was known.
        bytes_free: for a full disk or quota: what was free once the new file was discarded.
    """

    bytes_needed: int | None = None
    bytes_free: int | None = None


class RemoteError(FastserialError, OSError):
    """A remote store failed, after it was tried again; names the URL."""


class DistributedError(FastserialError, RuntimeError):
    """A collective save or load failed; every rank of the group raises it.

    It is also a `ConfigError`, `LoadMismatchError`, `FileNotFoundError` or `WriteError` if that is
    what the rank failed with; the last two with `errno` and `filename`. Errors of code that is not
    fastserial's, such as a `state_dict()`, are raised unchanged on the rank where they occurred;
    the other ranks raise this.

    Attributes:
        rank: the rank of the job that failed first, or that was silent.
        cause: what happened there.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(rank, cause)
        self.rank = rank
        self.cause = cause

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.cause}"


class MismatchedCallError(DistributedError):
    """The ranks of a group made different calls; nothing was saved or loaded by them.

    One of them skipped, repeated or renamed a call. The next call that all ranks make works.
    """


class DistributedConfigError(DistributedError, ConfigError):
    """Options or arguments of a rank are refused."""


class DistributedMismatchError(DistributedError, LoadMismatchError):
    """What a rank wants to fill and what the checkpoint holds differ."""


class DistributedNotFoundError(DistributedError, FileNotFoundError):
    """A rank does not see the file. Has `errno` and `filename`."""


class DistributedWriteError(DistributedError, WriteError):
    """A rank could not write the file. Has `errno` and `filename`; the previous file is intact."""


_DISTRIBUTED: tuple[tuple[type[Exception], type[DistributedError]], ...] = (
    (ConfigError, DistributedConfigError),
    (LoadMismatchError, DistributedMismatchError),
    (FileNotFoundError, DistributedNotFoundError),
    (WriteError, DistributedWriteError),
)


class ErrorKind(NamedTuple):
    """What the other ranks need to raise an error as one of its class.

    Attributes:
        number: of the class; -1 for any other.
        errno, filename: of an `OSError`.
    """

    number: int = -1
    errno: int | None = None
    filename: str | None = None


def distributed_kind(error: BaseException) -> ErrorKind:
    """Return what `distributed_error` needs to raise an error as one of its class elsewhere."""
    for number, (kind, _) in enumerate(_DISTRIBUTED):
        if isinstance(error, kind):
            if not isinstance(error, OSError):
                return ErrorKind(number)
            name = error.filename
            return ErrorKind(number, error.errno, name if isinstance(name, str) else None)
    return ErrorKind()


def distributed_error(
    rank: int,
    cause: str,
    kind: ErrorKind = ErrorKind(),  # noqa: B008 (it cannot be changed)
) -> DistributedError:
    """Return the error of another rank; `kind` as `distributed_kind` returns it."""
    make = DistributedError if kind.number < 0 else _DISTRIBUTED[kind.number][1]
    error = make(rank, cause)
    if isinstance(error, OSError):  # which took the rank for its errno
        error.errno, error.filename = kind.errno, kind.filename
    return error


class StorageChangedError(FastserialError, RuntimeError):
    """A storage was resized while it was being saved, so nothing was saved.

    Attributes:
        path: the file, None where it is not known. The previous file is intact.
    """

    def __init__(self) -> None:
        super().__init__(
            "a storage was resized while it was being saved, by another thread or a signal "
            "handler. Wait until torch.save has returned, or save a copy"
        )
        self.path: str | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.path, super().__str__()) if part)


def name_in(error: BaseException, path: str) -> None:
    """Put the target's path into an error that does not know it."""
    if isinstance(error, StorageChangedError):
        error.path = error.path or path


class MissingDirectoryError(WriteError, FileNotFoundError):
    """The directory of the target does not exist."""


class IsDirectoryTargetError(WriteError, IsADirectoryError):
    """The target is a directory."""


class NotDirectoryTargetError(WriteError, NotADirectoryError):
    """A component of the target's path is not a directory."""


class DeniedTargetError(WriteError, PermissionError):
    """The target or its directory may not be written."""


class UnmetOptionWarning(UserWarning):
    """What an option asks for cannot be done for a file: said once in a process for each reason.

    `last_load_report().fallback` and `last_save_report().fallback` have the reason, too.
    """


# What the user can do, by errno.
REMEDIES = {
    errno.ENOSPC: "Free space (or inodes) there or save to another disk",
    errno.EDQUOT: "Free space within the quota, or ask for a larger quota",
    errno.EFBIG: "The file system or `ulimit -f` does not allow a file of this size",
    errno.EROFS: "Remount the file system writable, or save elsewhere",
    errno.EIO: "The disk or the network failed; see the kernel log (dmesg)",
    errno.ESTALE: "The network file system lost the directory; remount it",
    errno.ENOTCONN: "The process of the FUSE file system has ended; remount it",
}

_BY_ERRNO: dict[int, type[WriteError]] = {
    errno.ENOENT: MissingDirectoryError,
    errno.EISDIR: IsDirectoryTargetError,
    errno.ENOTDIR: NotDirectoryTargetError,
    errno.EACCES: DeniedTargetError,
    errno.EPERM: DeniedTargetError,
}


def write_error(number: int, path: str | None, message: str | None = None) -> WriteError:
    """Return the `WriteError` for an errno, with the path and a remedy in its text."""
    kind = _BY_ERRNO.get(number, WriteError)
    return kind(number, message or os.strerror(number), path)


class UnsupportedTorchWarning(UserWarning):
    """The installed torch has no matching patch; torch stays stock."""
