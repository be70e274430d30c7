"""Reading tensors, or parts of them, from a file: only the bytes that are needed.

A part is described by a meta tensor: indexing computes its shape, strides and storage offset as for
any tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.serialization import LoadEndianness, get_default_load_endianness

from fastserial.config.performance import CONTIGUOUS_RUN, SCATTERED_CHUNK
from fastserial.errors import (
    PickleLimitError,
    UnreadableCheckpointError,
    UnreadableTensorError,
)
from fastserial.formats.container import Container, ZipContainer, open_container
from fastserial.formats.source import Source, naming
from fastserial.formats.tensors import TensorEntry, reach
from fastserial.formats.zip_format import PICKLE
from fastserial.interrupts import ours
from fastserial.loading.reader import DeviceSink, HostSink, ReadExtent, Sink
from fastserial.memory.storages import is_on_host

if TYPE_CHECKING:
    from fastserial.memory.buffers import Ring


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ExtentReader(Protocol):
    """Reads extents of a file."""

    def read_into(self, extents: Sequence[ReadExtent]) -> None:
        """Return when all have arrived."""


def meta_of(tensor: TensorEntry) -> torch.Tensor:
    """Return a meta tensor with the dtype, shape and strides of a tensor in a file.

    Raises:
        UnreadableTensorError: torch can make no tensor of this shape, or has no such dtype.
    """
    dtype = getattr(torch, tensor.dtype, None)
    if dtype is None:
        raise UnreadableTensorError(f"tensor {tensor.key!r}: this torch has no {tensor.dtype}")
    try:
        return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device="meta")
    except ours(RuntimeError, TypeError) as error:  # sizes or strides beyond 64 bits
        raise UnreadableTensorError(
            f"tensor {tensor.key!r} cannot be read: torch can make no tensor of its shape"
        ) from error


def is_dense(view: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory, each byte once, in any order."""
    expected = 1
    for step, size in sorted(
        (step, size) for size, step in zip(view.shape, view.stride(), strict=True) if size != 1
    ):
        if step != expected:
            return view.numel() == 0
        expected *= size
    return True


def _span(view: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    return reach(view.shape, view.stride()) * view.itemsize


def overlapping(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """Return the keys of two tensors that share memory, None if none do."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _span(tensor), key)
        for key, tensor in tensors
        if tensor.numel()
    )
    before, reached, owner = "", 0, ""
    for device, start, stop, key in spans:
        if device == before and start < reached:
            return owner, key
        if device != before or stop > reached:
            before, reached, owner = device, stop, key
    return None


def _first(base: int, view: torch.Tensor) -> int:
    return base + int(view.storage_offset()) * view.itemsize


def _same_layout(view: torch.Tensor, target: torch.Tensor) -> bool:
    steps = zip(view.shape, view.stride(), target.stride(), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in steps)


def direct_extent(
    base: int, view: torch.Tensor, target: torch.Tensor, ring: Ring | None = None
) -> ReadExtent | None:
    """Return the extent that fills a tensor, if the file has the bytes in its order.

    Args:
        base: offset in the file of element 0 of the view's storage (bytes).
        view: what to read.
        target: a tensor of the same dtype and shape, on the host or on a device.
        ring: the staging buffers of bytes for devices.
    """
    if not is_dense(view) or not _same_layout(view, target):
        return None
    if target.is_conj() or target.is_neg():  # its memory holds other values than its elements
        return None
    return ReadExtent(_first(base, view), target.numel() * target.itemsize, sink_of(target, ring))


def sink_of(target: torch.Tensor, ring: Ring | None = None) -> Sink:
    """Return the sink of the bytes of a dense tensor."""
    nbytes = target.numel() * target.itemsize
    if is_on_host(target.untyped_storage()):
        return HostSink(target.data_ptr(), nbytes, target)
    flat = torch.empty(0, dtype=torch.uint8, device=target.device)
    start = target.storage_offset() * target.itemsize
    flat.set_(target.untyped_storage(), start, (nbytes,), (1,))
    return DeviceSink(flat, ring)


def fetch(
    reader: ExtentReader, base: int, view: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return a new tensor with the elements of a part of a tensor in the file.

    The strides are those of the view where that costs no memory, else contiguous; such a tensor is
    put together on the host.

    Raises:
        CorruptCheckpointError: the file changed during the read.
        OSError: the file cannot be read.
    """
    nbytes, span = view.numel() * view.itemsize, _span(view)
    if is_dense(view) or 0 < span <= nbytes:  # each byte once, or some of them several times
        whole = torch.empty(span // view.itemsize, dtype=view.dtype, device=device)
        reader.read_into([ReadExtent(_first(base, view), span, sink_of(whole))])
        return whole.as_strided(view.shape, view.stride())
    out = torch.empty(view.shape, dtype=view.dtype, device="cpu")
    runs = list(_runs(base, view, out))
    if runs:
        reader.read_into(runs)
    else:
        read_tensor_into(reader, base, view, out)
    return out.to(device)


def read_tensor_into(
    reader: ExtentReader,
    base: int,
    view: torch.Tensor,
    target: torch.Tensor,
    pending: tuple[str, ...] = (),
) -> None:
    """Copy the elements of a part of a tensor in the file to a tensor, some at a time.

    Args:
        reader, base, view: as `fetch`.
        target: of the same dtype and shape; any device, any strides.
        pending: operations that are applied to the elements first.
    """
    span = _span(view)
    if not span:
        return
    if span <= SCATTERED_CHUNK or view.dim() == 0:
        raw = torch.empty(span // view.itemsize, dtype=view.dtype, device="cpu")
        reader.read_into([ReadExtent(_first(base, view), span, sink_of(raw))])
        found = resolved(raw.as_strided(view.shape, view.stride()), pending)
        if target.is_neg():
            target.copy_(found)
        else:
            _as_integers(target).copy_(_as_integers(found))
        return
    dim = max(range(view.dim()), key=lambda d: (view.shape[d] > 1, view.stride(d)))
    row = view.stride(dim) * view.itemsize
    rows = max(1, SCATTERED_CHUNK // max(row, 1))
    if view.shape[dim] <= 1:  # cannot be cut further
        rows = 1
    for start in range(0, view.shape[dim], rows):
        count = min(rows, view.shape[dim] - start)
        part, into = view.narrow(dim, start, count), target.narrow(dim, start, count)
        if count == 1:
            part, into = part.select(dim, 0), into.select(dim, 0)
        read_tensor_into(reader, base, part, into, pending)


def resolved(tensor: torch.Tensor, pending: tuple[str, ...]) -> torch.Tensor:
    """Return a tensor with its elements conjugated (`conj`) or negated (`neg`), or both."""
    tensor = tensor.conj() if "conj" in pending else tensor
    tensor = torch._neg_view(tensor) if "neg" in pending else tensor
    return tensor.resolve_conj().resolve_neg()


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that can be copied: some dtypes have no kernel for it."""
    return tensor if tensor.is_complex() else tensor.view(_INTEGERS[tensor.itemsize])


def _runs(base: int, view: torch.Tensor, out: torch.Tensor) -> Iterator[ReadExtent]:
    """Yield extents for the contiguous runs of a view; none if they are short."""
    inner, cut = 1, view.dim()
    while cut and view.stride(cut - 1) == inner:
        cut -= 1
        inner *= view.shape[cut]
    nbytes = inner * view.itemsize
    if nbytes < CONTIGUOUS_RUN:
        return
    outer = list(zip(view.shape[:cut], view.stride()[:cut], strict=True))
    address, first = out.data_ptr(), _first(base, view)
    for index, position in enumerate(itertools.product(*(range(size) for size, _ in outer))):
        at = sum(i * step for i, (_, step) in zip(position, outer, strict=True))
        sink = HostSink(address + index * nbytes, nbytes, out)
        yield ReadExtent(first + at * view.itemsize, nbytes, sink)


def open_readable(source: Source, path: str) -> Container:
    """Return the container of a checkpoint, whose pickle has been read.

    Args:
        source: the file.
        path: its name, for errors.

    Raises:
        CorruptCheckpointError: the file is damaged.
        UnreadableCheckpointError: the file is no checkpoint.
        UnreadableTensorError: it was written on a big-endian machine.
        PickleLimitError: its pickle is larger than the limits.
        OSError: it cannot be read.
    """
    with naming(path):
        container = open_container(source, path)
        if isinstance(container, ZipContainer) and container.directory.find(PICKLE) is None:
            text = "the archive holds no data.pkl: not a checkpoint of torch.save"
            raise UnreadableCheckpointError(text)
        if not is_little_endian(container):
            text = "the file was written on a big-endian machine: use torch.load"
            raise UnreadableTensorError(text)
        if not container.outline.complete:  # reads the pickle
            raise PickleLimitError("there is more in its pickle than is looked at: use torch.load")
    return container


def is_little_endian(container: Container) -> bool:
    """Return whether `torch.load` takes the storages of a file for little-endian.

    Raises:
        CorruptCheckpointError: the record that says so is damaged.
        OSError: it cannot be read.
    """
    order = container.byte_order
    if order is None:
        return get_default_load_endianness() is not LoadEndianness.BIG
    return order == "little"
