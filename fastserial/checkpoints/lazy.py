"""`fastserial.open`: tensors of a checkpoint one by one, or parts of them, as safetensors does."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode

from fastserial.checkpoints.tensor_read import fetch, meta_of, open_readable
from fastserial.config import Config, current
from fastserial.files.paths import absolute
from fastserial.files.remote import RemoteSource, is_url
from fastserial.formats.safetensors import TYPE_NAMES
from fastserial.formats.source import DescriptorSource
from fastserial.formats.tensors import TensorEntry
from fastserial.interrupts import suppress
from fastserial.loading.reader import OccasionalReader, ReadExtent, fill_each
from fastserial.reports import warn_unmet


class LazyCheckpoint:
    """An open checkpoint whose tensors are read when they are requested.

    Keys are joined by dots where dictionaries, lists or objects are nested: `model.0.weight`. The
    pickle is read, but never executed. Safe for use by several threads, in signal handlers, and in
    forked children such as the workers of a `DataLoader`; pickled, as for spawned ones, it is
    reopened by its path. It keeps no threads and no buffers between reads, and is closed when the
    last reference is gone.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str | torch.device = "cpu",
        config: Config | None = None,
    ) -> None:
        """Open a zip, legacy or safetensors file.

        Args:
            path: the file, or the URL of a zip or safetensors file.
            device: where tensors go.
            config: options; by default those in force.

        Raises:
            CorruptCheckpointError: the file is damaged.
            UnreadableCheckpointError: the file is no checkpoint.
            UnreadableTensorError: it was written on a big-endian machine.
            OSError: it cannot be opened.
        """
        self._device = torch.device(device)
        self._path = os.fspath(path)
        remote = is_url(self._path)
        self._opened = (self._path if remote else absolute(os.fsdecode(path)), device, config)
        self._file: RemoteReader | OccasionalReader
        if remote:
            self._file = RemoteReader(self._path)
            self._container = open_readable(self._file.source, self._path)
        else:
            self._file = OccasionalReader(path, config)
            try:
                self._container = open_readable(DescriptorSource(self._file.fd), self._file.name)
            except BaseException:  # its traceback keeps this object
                self._file.close()
                raise

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyCheckpoint, self._opened

    @property
    def container(self) -> str:
        """`zip`, `legacy` or `safetensors`."""
        return self._container.format

    @property
    def path(self) -> str:
        """The file's path as given."""
        return self._path

    def keys(self) -> list[str]:
        """Return the keys of all tensors, in the order in which they were saved.

        Those that `get_tensor` refuses because their dtype is unknown, or the pickle is damaged
        there, come first.
        """
        return self._container.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._container

    def get_tensor(self, key: str) -> torch.Tensor:
        """Read one tensor, with the dtype and shape it was saved with, and only its own bytes.

        Raises:
            CheckpointKeyError: there is no such tensor; a `KeyError`.
            UnreadableTensorError: only `torch.load` can load it (quantized, conjugated, meta, ...).
            CorruptCheckpointError: the file changed since it was opened.
            OSError: it cannot be read.
        """
        tensor = self._container.tensor(key)
        return self._read(tensor, meta_of(tensor))

    def get_slice(self, key: str) -> TensorSlice:
        """Return a tensor that is read when it is indexed: `get_slice(key)[:, 3:7]`.

        Raises:
            CheckpointKeyError, UnreadableTensorError: as `get_tensor`.
        """
        return TensorSlice(self, self._container.tensor(key))

    def close(self) -> None:
        """Close the file, once reads in progress in other threads are done. Idempotent.

        Tensors that were read stay valid.
        """
        self._file.close()

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, tensor: TensorEntry, view: torch.Tensor) -> torch.Tensor:
        base = self._container.offset_of(tensor)
        if self._device.type == "meta" or detect_fake_mode(None) is not None:  # no bytes needed
            return torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=self._device
            )
        if isinstance(self._file, RemoteReader):
            return fetch(self._file, base, view, torch.device("cpu")).to(self._device)
        return fetch(self._file, base, view, self._device)


class RemoteReader:
    """A file at a URL, of which ranges are read.

    Attributes:
        source: its bytes.
    """

    def __init__(self, url: str) -> None:
        """Ask for its size; errors as of `RemoteSource`."""
        self.source = RemoteSource(url)

    def read_into(self, extents: Sequence[ReadExtent]) -> None:
        """Read extents into host memory; returns when all have arrived.

        Raises:
            CorruptCheckpointError: the file changed since it was opened.
            RemoteError: the store fails.
        """
        fill_each(extents, self.source.read_to)
        self.source.check_unchanged()

    def close(self) -> None:
        """Do nothing: no connection is kept for it."""


class TensorSlice:
    """A tensor in a file: indexing it reads only the bytes of the result."""

    def __init__(self, file: LazyCheckpoint, tensor: TensorEntry) -> None:
        self._file = file
        self._tensor = tensor
        self._meta = meta_of(tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyCheckpoint.get_slice, (self._file, self._tensor.key)

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
        """Return safetensors' name of the dtype (`F32`), or torch's if there is none."""
        return TYPE_NAMES.get(self._tensor.dtype, self._tensor.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read what `tensor[index]` would be, for integers, slices, `...` and None.

        Raises:
            TypeError: indexing with tensors or lists, which gives no view.
            IndexError: as for any tensor.
            CorruptCheckpointError, OSError: as `LazyCheckpoint.get_tensor`.
        """
        parts = tuple(map(_plain, index if isinstance(index, tuple) else (index,)))
        return self._file._read(self._tensor, self._meta[parts])


def _plain(part: Any) -> Any:
    """Return a part of an index in Python's own types: numpy's integers are taken as well.

    Raises:
        TypeError: indexing with it gives no view.
    """
    if part is None or part is Ellipsis or isinstance(part, slice):
        return part
    if not isinstance(part, bool | torch.Tensor):
        with suppress(TypeError):
            return operator.index(part)
    raise TypeError(
        f"a slice of a checkpoint is indexed with integers, slices, ... and None, "
        f"not {type(part).__name__}"
    )


def open_checkpoint(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> LazyCheckpoint:
    """Open a checkpoint to read single tensors of it; see `LazyCheckpoint`.

        with fastserial.open("ckpt.pt") as file:
            weight = file.get_tensor("model.weight")
            rows = file.get_slice("model.weight")[1:2]

    Nothing is verified: where the option `verify_on_load` is set, a warning says so.

    Raises:
        CorruptCheckpointError: the file is damaged.
        UnreadableCheckpointError: the file is no checkpoint.
        UnreadableTensorError: it was written on a big-endian machine.
        OSError: it cannot be opened.
    """
    if current().verify_on_load:
        why = "`open` reads parts of records, which have no checksums: call `fastserial.verify`"
        warn_unmet("verify_on_load", why)
    return LazyCheckpoint(path, device)
