"""`fastserial.open`: tensors of a checkpoint one by one, or parts of them, as safetensors does."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch._guards import detect_fake_mode

from fastserial.config import Config
from fastserial.containers.safetensors import TYPE_NAMES
from fastserial.reader import FastFileReader
from fastserial.tensorindex import TensorPlace, read_index
from fastserial.tensorread import apply_pending, direct_extent, fetch, is_dense, meta_of, resolved

__all__ = ["LazyCheckpoint", "TensorSlice", "open_checkpoint"]


class LazyCheckpoint:
    """An open checkpoint whose tensors are read when they are asked for.

    Keys are joined by dots where dictionaries, lists or objects are nested: `model.0.weight`. The
    pickle is read, but never executed. Safe for use by several threads, and in forked children
    such as the workers of a `DataLoader`. One that nobody uses any more is closed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str | torch.device = "cpu",
        config: Config | None = None,
    ) -> None:
        """Open a zip, legacy or safetensors file.

        Args:
            path: the file.
            device: where tensors go.
            config: options; by default those in force.

        Raises:
            CorruptCheckpointError: the file is damaged, or no checkpoint.
            UnreadableTensorError: it was written on a big-endian machine.
            OSError: it cannot be opened.
        """
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._spent = False  # the reader failed, or its threads are in the parent process
        self._use(FastFileReader(path, config))
        try:
            self._index = read_index(self._reader.fd, self._reader.name)
        except BaseException:
            self._reader.close()
            raise
        _all.add(self)

    @property
    def container(self) -> str:
        """`zip`, `legacy` or `safetensors`."""
        return self._index.container

    @property
    def path(self) -> str:
        """The file's path as given."""
        return self._reader.name

    def keys(self) -> list[str]:
        """Return the keys of all tensors, in the order in which they were saved."""
        return self._index.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def get_tensor(self, key: str) -> torch.Tensor:
        """Read one tensor, with the dtype and shape it was saved with, without its storage's rest.

        Raises:
            CheckpointKeyError: there is no such tensor; a `KeyError`.
            UnreadableTensorError: only `torch.load` can make it (quantized, compressed, meta, ...).
            CorruptCheckpointError: the file changed since it was opened.
            OSError: it cannot be read.
        """
        place = self._index.place(key)
        return self._read(place, meta_of(place))

    def get_slice(self, key: str) -> TensorSlice:
        """Return a tensor that is read when it is indexed: `get_slice(key)[:, 3:7]`.

        Raises:
            CheckpointKeyError, UnreadableTensorError: as `get_tensor`.
        """
        return TensorSlice(self, self._index.place(key))

    def close(self) -> None:
        """Close the file. Tensors that were read stay. Idempotent."""
        with self._lock:
            self._reader.close()

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _use(self, reader: FastFileReader) -> None:
        self._reader = reader
        self._closing = weakref.finalize(self, reader.close)  # its threads would keep it open

    @contextlib.contextmanager
    def _reading(self) -> Iterator[FastFileReader]:
        """Lend the reader to one thread; a reader is of no more use after an error."""
        with self._lock:
            if self._spent and not self._reader.closed:
                old, closing = self._reader, self._closing
                self._use(old.reopened())
                self._spent = False
                closing.detach()
                old.close()
            try:
                yield self._reader
            except BaseException:
                self._spent = True
                raise

    def _forked(self) -> None:
        self._lock = threading.Lock()
        self._spent = True

    def _read(self, place: TensorPlace, view: torch.Tensor) -> torch.Tensor:
        base = place.storage.offset + place.first
        if self._device.type == "meta" or detect_fake_mode(None) is not None:  # no bytes needed
            empty = torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=self._device
            )
            return apply_pending(empty, place.pending)
        with self._reading() as reader:
            if self._device.type == "cpu":
                return apply_pending(fetch(reader, base, view), place.pending)
            if is_dense(view):  # through staging, without a copy on the host
                out = torch.empty_strided(
                    view.shape, view.stride(), dtype=view.dtype, device=self._device
                )
                extent = direct_extent(base, view, out)
                if extent is not None:
                    reader.read_into([extent])
                    return apply_pending(out, place.pending)
            found = fetch(reader, base, view)
            return resolved(found, place.pending).to(self._device)


_all: weakref.WeakSet[LazyCheckpoint] = weakref.WeakSet()


def _forked() -> None:
    for file in list(_all):
        file._forked()


os.register_at_fork(after_in_child=_forked)


class TensorSlice:
    """A tensor in a file: indexing it reads what is asked for, and no more."""

    def __init__(self, file: LazyCheckpoint, place: TensorPlace) -> None:
        self._file = file
        self._place = place
        self._meta = meta_of(place)

    @property
    def shape(self) -> torch.Size:
        """The whole tensor's shape."""
        return self._meta.shape

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self._meta.dtype

    def get_shape(self) -> list[int]:
        """Return the whole tensor's shape."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors' words (`F32`), or torch's without one."""
        return TYPE_NAMES.get(self._place.dtype, self._place.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read what `tensor[index]` would be, for integers, slices, `...` and None.

        Raises:
            TypeError: indexing with tensors or lists, which gives no view.
            IndexError: as for any tensor.
            CorruptCheckpointError, OSError: as `LazyCheckpoint.get_tensor`.
        """
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, bool) or not (
                isinstance(part, int | slice) or part is None or part is Ellipsis
            ):
                raise TypeError(
                    f"a slice of a checkpoint is indexed with integers, slices, ... and None, "
                    f"not {type(part).__name__}"
                )
        return self._file._read(self._place, self._meta[index])


def open_checkpoint(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> LazyCheckpoint:
    """Open a checkpoint to read single tensors of it; see `LazyCheckpoint`.

    with fastserial.open("ckpt.pt") as file:
        weight = file.get_tensor("model.weight")
        rows = file.get_slice("model.embed")[1000:2000]

    Raises:
        CorruptCheckpointError: the file is damaged, or no checkpoint.
        UnreadableTensorError: it was written on a big-endian machine.
        OSError: it cannot be opened.
    """
    return LazyCheckpoint(path, device)
