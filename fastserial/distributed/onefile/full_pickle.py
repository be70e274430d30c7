"""torch pickles a sharded state as if it were whole; stand-ins show where the bytes belong."""

from __future__ import annotations

import functools
import pickle
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from fastserial.checksums import crc32
from fastserial.distributed.plan.schedule import FilePlan
from fastserial.distributed.sharding.flat_shard import FlatShard
from fastserial.distributed.sharding.pieces import as_dtensor
from fastserial.distributed.state.merging import LeafSpec
from fastserial.distributed.state.tables import StateTable, is_plain
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Trailer, clip
from fastserial.formats.zip_layout import ZipLayout, ZipPlan
from fastserial.memory.untouched import Untouched
from fastserial.saving.archive import checksums_wanted, finish_layout, storage_alignment


class ArchiveRecord(NamedTuple):
    """A record of the file.

    Attributes:
        data: its bytes, None for a storage.
        source: number of a storage's source (`Table`); None if the storage is empty.
    """

    name: str
    nbytes: int
    data: bytes | None
    source: int | None


class AbsentMemory:
    """Memory of a storage of which only the size is known."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def copy_to(self, address: int, start: int, length: int) -> None:
        raise ValueError("no rank holds this memory as a whole")


class FileLayout:
    """The file as rank 0 lays it out: torch writes the records to it as to a PyTorchFileWriter.

    Attributes:
        records: what is in the file, in its order; first the pickle.
        rest: storages that are in no container the ranks look into. A source of -1 or below is
            one of them, `rest[-1 - source]`.
    """

    def __init__(
        self, archive: str, numbers: Mapping[int, int], of_storage: Mapping[int, int]
    ) -> None:
        """Lay nothing out yet.

        Args:
            archive: the name that torch puts before the records' names.
            numbers: of the sources, by the address of what is pickled for them.
            of_storage: of the sources, by the identity of their storage.
        """
        self.records: list[ArchiveRecord] = []
        self.rest: list[torch.UntypedStorage] = []
        self._archive = archive
        self._numbers, self._of_storage = numbers, of_storage

    def archive_name(self) -> str:
        return self._archive

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Take a record of torch's; the bytes of a storage stay where they are."""
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes | bytearray | memoryview):
            self.records.append(ArchiveRecord(name, size, bytes(data[:size]), None))
        else:
            source = self._source_of(data) if size else None
            self.records.append(ArchiveRecord(name, size, None, source))

    def _source_of(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage.data_ptr())
        if number is None:
            number = self._of_storage.get(storage._cdata)
        if number is None:
            self.rest.append(storage)
            number = -len(self.rest)
        return number

    @functools.cached_property
    def plan(self) -> ZipPlan:
        """The layout. The memory of its storages is nowhere; `records` says what they are."""
        layout = ZipLayout(self._archive, storage_alignment(), checksums_wanted())
        for record in self.records:
            if record.data is None:
                layout.add_memory(record.name, AbsentMemory(record.nbytes), b"")
            else:
                layout.add_bytes(record.name, record.data, crc32(record.data))
        return finish_layout(layout)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.plan.nbytes

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [extent.offset for extent in self.plan.extents]

    @property
    def trailer(self) -> Extent | None:
        """What needs the checksums of all ranks, None if nothing does."""
        last = self.plan.extents[-1]
        return last if isinstance(last.source, Trailer) else None

    def bytes_at(self, offset: int, length: int) -> torch.Tensor:
        """Return the zip's bytes in a range of the file, with 0 for checksums not known yet."""
        text = b"".join(
            memoryview(extent.source.data)[extent.start : extent.start + extent.length]
            for extent in self.extents_at(offset, length)
            if isinstance(extent.source, Literal | DescriptorPatch)
        )
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def extents_at(self, offset: int, length: int) -> Iterator[Extent]:
        """Return the extents that are the zip's bytes in a range of the file."""
        first = max(bisect_right(self._starts, offset) - 1, 0)
        stop = bisect_right(self._starts, offset + length)
        return clip(self.plan.extents[first:stop], offset, offset + length)

    def file_plan(self, writers: list[int]) -> FilePlan:
        """Return what all ranks have to know of the file. What needs checksums is not in it."""
        data = (extent for extent in self.plan.extents if isinstance(extent.source, Data))
        sources = (
            (index, record.source)
            for index, record in enumerate(self.records)
            if record.source is not None
        )
        records = [
            (*source, extent.offset, extent.length)
            for source, extent in zip(sources, data, strict=True)
        ]
        end = self.trailer.offset if self.trailer is not None else self.plan.nbytes
        return FilePlan(end, records, writers, checksums_wanted())


_PROTOCOL = 2  # torch.save's default
# Types of most of what is in a pickle. torch asks each object whether it is a storage, which takes
# as long as the rest.
_NO_STORAGES = frozenset(
    {type(None), bool, int, float, str, bytes, tuple, list, dict, OrderedDict, FunctionType, type}
)


class StandIns:
    """What torch pickles instead of tensors that no rank holds as a whole.

    They are made of a table, and fit every state whose table is the same (`facts`). None of a
    state's own tensors is kept.
    """

    def __init__(self, table: StateTable, values: Sequence[Any]) -> None:
        """Make them.

        Args:
            values: the leaves of the state.

        Raises:
            OSError: there are not as many addresses.
        """
        untouched = Untouched(sum(spec.nbytes for spec in table.specs), len(table.specs))
        weakref.finalize(self, untouched.close)
        self._sources = table.of_leaves
        self._plain = [not isinstance(leaf, LeafSpec) and is_plain(leaf) for leaf in values]
        self._numbers: dict[int, int] = {}  # of the sources, by the address of what stands for them
        self._made = _made_for(table, values, untouched, self._numbers)
        # As torch's pickler takes them apart, which is half of what pickling them takes.
        self._reduced = {
            number: _reduced(made)
            for number, made in self._made.items()
            if isinstance(made, torch.Tensor)
        }

    def lay_out(self, archive: str, state: object, values: Sequence[Any]) -> FileLayout:
        """Let torch pickle a state with its sharded tensors as whole ones.

        Args:
            archive: the name that torch puts before the records' names.
            values: the leaves of the state.

        Raises:
            Exception: whatever pickling the object raises.
        """
        of_leaf: dict[int, int] = {}
        of_storage: dict[int, int] = {}
        for leaf, number, plain in zip(values, self._sources, self._plain, strict=True):
            if plain:
                of_storage[leaf.untyped_storage()._cdata] = number
            else:
                of_leaf[id(leaf)] = number
        laid_out = FileLayout(archive, self._numbers, of_storage)
        module: Any = SimpleNamespace(Pickler=self._pickler(of_leaf, of_storage))
        save: Any = torch.serialization._save
        save(state, laid_out, module, _PROTOCOL, False)
        return laid_out

    def _pickler(
        self, of_leaf: Mapping[int, int], of_storage: Mapping[int, int]
    ) -> type[pickle.Pickler]:
        """Return what pickles leaves with sources, given by their `id`, by what stands for them."""
        reduced, made = self._reduced, self._made

        class StandInPickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                """Let torch's own look at what may be a storage only."""
                ask: Any = cls.persistent_id
                cls.persistent_id = lambda self, obj: (  # type: ignore[method-assign]
                    None if type(obj) in _NO_STORAGES else ask(self, obj)
                )

            def reducer_override(self, obj: Any) -> Any:
                number = of_leaf.get(id(obj))
                if number is not None and number in reduced:
                    return reduced[number]
                if not isinstance(obj, torch.Tensor | FlatShard | LeafSpec):
                    return NotImplemented
                if isinstance(obj, LeafSpec) and number is not None:
                    return _reduced(_joined(obj, made[number]))
                if isinstance(obj, FlatShard) or as_dtensor(obj) is not None:
                    raise ValueError(
                        "a sharded tensor is within an object that is no dict, list or tuple; the "
                        f"ranks cannot look into it: {obj!r}"
                    )
                if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
                    return _on_host(obj, made.get(of_storage.get(_storage_of(obj), -1)))
                return NotImplemented

        return StandInPickler


def _made_for(
    table: StateTable, values: Sequence[Any], untouched: Untouched, numbers: dict[int, int]
) -> dict[int, torch.Tensor | torch.UntypedStorage]:
    """Return the tensor or storage that is pickled in place of each source that is not as it is.

    Args:
        numbers: gets the number of the source, by the address of what stands for it.
    """
    found: dict[int, torch.Tensor | torch.UntypedStorage] = {}
    for number, (spec, first) in enumerate(zip(table.specs, table.firsts, strict=True)):
        leaf = values[first]
        joined = isinstance(leaf, LeafSpec)
        if leaf.storage is not None if joined else is_plain(leaf):
            if not joined and leaf.device.type == "cpu":
                continue
            found[number] = made = untouched.storage(spec.nbytes)
            address = made.data_ptr()
        else:
            whole = untouched.tensor(spec.shape, spec.dtype)
            if not isinstance(leaf, FlatShard) and leaf.requires_grad:
                whole.requires_grad_()
            found[number] = whole
            address = whole.data_ptr()
        if spec.nbytes:
            numbers[address] = number
    return found


def _joined(like: LeafSpec, storage: Any) -> Any:
    """Return the plain tensor that is pickled for one of a merged state.

    Args:
        storage: what stands for its storage.
    """
    _, _, offset, stride = like.storage or (0, 0, 0, ())
    tensor = _view(storage, like.spec.dtype, offset, like.spec.shape, stride)
    if like.is_parameter:
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor.requires_grad_(like.requires_grad)


def _on_host(tensor: torch.Tensor, storage: Any | None) -> Any:
    """Return how a plain tensor of a device is pickled as if it were on the host.

    Args:
        storage: what stands for its storage, if anything does.
    """
    own: Any = tensor.untyped_storage()
    offset = int(tensor.storage_offset())
    host = _view(
        own.cpu() if storage is None else storage,
        tensor.dtype,
        offset,
        tensor.shape,
        tensor.stride(),
    )
    return _reduced(host.requires_grad_(tensor.requires_grad))


def _view(
    storage: Any, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    found = torch.empty(0, dtype=dtype, device="cpu")
    return found.set_(storage, offset, shape, stride)


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _reduced(tensor: Any) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)
