"""COMPATIBILITY LAYER: repairs DeepSpeed's own `deepspeed.io.FastFileWriter`, in place.

Only for programs that must keep using that class; `fastserial.FastFileWriter` takes its config and
needs none of this. What is repaired in DeepSpeed 0.18 to 0.19.8, each shown by a test:

- On CPU the class cannot be made: its op `UtilsBuilder` is not implemented there.
- That op's `cast_to_byte_tensor` keeps no reference to the tensors it aliases, so the size in
  front of each storage of a legacy file is read after it was freed. Ours is a view.
- An existing file is not truncated: a longer one keeps its end after the new data.
- A write that failed is not noticed (no event result is read), so a full disk leaves a file with
  holes or without its end, and `close` succeeds. Ours reserves the space and looks afterwards.
- Requests are aligned to 512 bytes whatever the device wants; on 4096-byte sectors writes are
  refused, unnoticed.

Not repaired: the file is not replaced as a whole, its directory is not synced, and a writer that is
one of `num_parallel_writers` keeps only its share, by design.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed.io.fast_file_writer as upstream
import torch

from fastserial.engines.deepspeed.holes import is_written
from fastserial.errors import write_error
from fastserial.files import linux

__all__ = ["repair", "repaired", "restore"]

_lock = threading.RLock()  # a signal handler may come while its thread holds it
_originals: dict[str, Any] = {}
_SIZE_BYTES = 8  # in front of each storage of a legacy file


class _ByteViews:
    """Stands for the op `UtilsBuilder`."""

    def load(self) -> _ByteViews:
        return self

    @staticmethod
    def cast_to_byte_tensor(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the tensors as bytes; a view keeps its tensor's memory."""
        return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]


class _AlignedHandle:
    """A handle whose alignment is the device's."""

    def __init__(self, handle: Any, sector: int) -> None:
        self._handle = handle
        self._alignment = math.lcm(
            handle.get_alignment(), sector * handle.get_intra_op_parallelism()
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def get_alignment(self) -> int:
        """Return the bytes that each of the handle's threads can write a whole part of."""
        return self._alignment


def _init(self: Any, file_path: str, config: Any) -> None:
    fd = os.open(file_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        alignment = linux.direct_alignment(fd)
    finally:
        os.close(fd)
    if alignment is not None and alignment.kernel_reported:
        config = copy.copy(config)
        config.dnvme_handle = _AlignedHandle(config.dnvme_handle, alignment.offset)
    _originals["__init__"](self, file_path, config)


def _save_storage_list(self: Any, storages: Sequence[Any], save_size: bool) -> Any:
    nbytes = sum(storage.nbytes() + _SIZE_BYTES * save_size for storage, _ in storages)
    done = self._stats["bytes"]
    if nbytes and self._num_parallel_writers == 1:
        try:
            linux.preallocate(self._aio_fd, done, nbytes, keep_size=True)
        except OSError as error:
            raise write_error(error.errno or errno.EIO, self._file_path) from error
    return _originals["_save_storage_list"](self, storages, save_size)


def _close(self: Any) -> None:
    _originals["close"](self)
    nbytes = self._file_offset
    fd = os.open(self._file_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd).st_size
        whole = found == nbytes and (not nbytes or is_written(fd, 0, nbytes))
        free = linux.free_bytes(fd)
    finally:
        os.close(fd)
    if not whole:
        raise write_error(
            errno.ENOSPC if free < nbytes else errno.EIO,
            self._file_path,
            f"DeepSpeed lost writes: the file should be {nbytes} bytes without holes; "
            f"it has {found} bytes, and {free} are free. Save again, to a disk with room",
        )


_METHODS: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "_save_storage_list": _save_storage_list,
    "close": _close,
}


def repair() -> None:
    """Repair DeepSpeed's class for the whole process. May be called again."""
    with _lock:
        if _originals:
            return
        kind = upstream.FastFileWriter
        _originals["UtilsBuilder"] = upstream.UtilsBuilder
        for name, method in _METHODS.items():
            original = _originals[name] = vars(kind)[name]
            setattr(kind, name, functools.wraps(original)(method))
        upstream.UtilsBuilder = _ByteViews


def restore() -> None:
    """Give DeepSpeed its own class back."""
    with _lock:
        if not _originals:
            return
        upstream.UtilsBuilder = _originals.pop("UtilsBuilder")
        for name in _METHODS:
            setattr(upstream.FastFileWriter, name, _originals[name])
        _originals.clear()


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Repair DeepSpeed's class inside a `with` block."""
    repair()
    try:
        yield
    finally:
        restore()
