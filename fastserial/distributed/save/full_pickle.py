"""torch pickles a sharded state as if it were whole; placeholders show where the bytes belong."""

from __future__ import annotations

import functools
import pickle
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from fastserial.distributed.layout.flat_shard import FlatShard
from fastserial.distributed.layout.placement import is_sharded
from fastserial.distributed.save.partition import FilePlan
from fastserial.distributed.state.merging import LeafSpec
from fastserial.distributed.state.tables import StateTable
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Trailer, clip
from fastserial.formats.zip_layout import ZipPlan
from fastserial.memory.address_reservation import AddressReservation
from fastserial.saving.archive import ZipArchive, checksums_wanted


class AbsentMemory:
    """Memory of a storage of which only the size is known."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def copy_to(self, address: int, start: int, length: int) -> None:
        raise ValueError("no rank holds this memory as a whole")


class FileLayout(ZipArchive):
    """The file as rank 0 lays it out: of each storage it has the source, and no memory.

    Attributes:
        rest: storages that are in no container the ranks look into. A source of -1 or below is
            one of them, `rest[-1 - source]`.
    """

    def __init__(self, archive: str, of_storage: Mapping[int, int]) -> None:
        """Lay nothing out yet.

        Args:
            archive: the name that torch puts before the records' names.
            of_storage: numbers of the sources, by the identity of what is pickled for them.
        """
        super().__init__(None, archive)
        self.rest: list[torch.UntypedStorage] = []
        self._count = 0  # of records
        self._sources: list[tuple[int, int]] = []  # records with storages that are not empty
        self._of_storage = of_storage

    def write_record(
        self, name: str, data: str | bytes | int | torch.UntypedStorage, size: int
    ) -> None:
        """Take a record of torch's; the bytes of a storage stay where they are."""
        if isinstance(data, torch.UntypedStorage):
            if size:
                self._sources.append((self._count, self._source_of(data)))
            self._layout.add_memory(name, AbsentMemory(size), b"")
        else:
            super().write_record(name, data, size)
        self._count += 1

    def add_storages(self, storages: Sequence[torch.UntypedStorage], names: Sequence[str]) -> None:
        """Take all storages at once, as the patched `torch.save` gives them."""
        for name, storage in zip(names, storages, strict=True):
            self.write_record(name, storage, storage.nbytes())

    def _source_of(self, storage: torch.UntypedStorage) -> int:
        number = self._of_storage.get(storage._cdata)
        if number is None:
            self.rest.append(storage)
            number = -len(self.rest)
        return number

    @property
    def plan(self) -> ZipPlan:
        """The layout."""
        return self.lay_out()

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

    def extents_at(self, offset: int, length: int) -> Iterator[Extent]:
        """Return the extents that are the zip's bytes in a range of the file.

        What needs checksums that are not known yet has 0 in their place.
        """
        first = max(bisect_right(self._starts, offset) - 1, 0)
        stop = bisect_right(self._starts, offset + length)
        for extent in clip(self.plan.extents[first:stop], offset, offset + length):
            if isinstance(extent.source, DescriptorPatch):
                yield extent._replace(source=Literal(extent.source.data))
            else:
                yield extent

    def file_plan(self, writers: list[int]) -> FilePlan:
        """Return what all ranks have to know of the file. What needs checksums is not in it."""
        data = [extent for extent in self.plan.extents if isinstance(extent.source, Data)]
        records = [
            (*source, extent.offset, extent.length)
            for source, extent in zip(self._sources, data, strict=True)
        ]
        end = self.trailer.offset if self.trailer is not None else self.plan.nbytes
        return FilePlan(end, records, writers, checksums_wanted())


_PROTOCOL = 2  # torch.save's default


class Placeholders:
    """What is pickled in place of sources that are not pickled as they are; no bytes of them.

    Attributes:
        table: of the sources.
        made: a tensor for a sharded source, a storage for that of plain tensors, by their numbers.
        reduced: how torch pickles the former.
        of_storage: numbers of the sources, by the identity of the storages.
    """

    def __init__(self, table: StateTable, values: Sequence[Any]) -> None:
        """Make them.

        Args:
            values: the leaves of the state.

        Raises:
            OSError: there are not as many addresses.
        """
        self.table = table
        self.made: dict[int, torch.Tensor | torch.UntypedStorage] = {}
        self.reduced: dict[int, Any] = {}
        self.of_storage: dict[int, int] = {}
        reserved = AddressReservation(sum(spec.nbytes for spec in table.specs), len(table.specs))
        weakref.finalize(self, reserved.close)
        for number, (spec, first) in enumerate(zip(table.specs, table.firsts, strict=True)):
            leaf = values[first]
            joined = isinstance(leaf, LeafSpec)
            if leaf.storage is not None if joined else not is_sharded(leaf):
                if not joined and leaf.device.type == "cpu":
                    continue
                self.made[number] = storage = reserved.storage(spec.nbytes)
            else:
                self.made[number] = whole = reserved.tensor(spec.shape, spec.dtype)
                if not isinstance(leaf, FlatShard) and leaf.requires_grad:
                    whole.requires_grad_()
                self.reduced[number] = _reduced(whole)
                storage = whole.untyped_storage()
            self.of_storage[storage._cdata] = number


def lay_out(
    archive: str, state: object, values: Sequence[Any], placeholders: Placeholders
) -> FileLayout:
    """Let torch pickle a state with its sharded tensors as whole ones.

    Args:
        archive: the name that torch puts before the records' names.
        values: the leaves of the state.
        placeholders: for them.

    Raises:
        Exception: whatever pickling the object raises.
    """
    of_leaf: dict[int, int] = {}
    of_storage = dict(placeholders.of_storage)
    for leaf, number in zip(values, placeholders.table.of_leaves, strict=True):
        if number in placeholders.reduced or isinstance(leaf, LeafSpec):
            of_leaf[id(leaf)] = number
        else:
            of_storage[leaf.untyped_storage()._cdata] = number
    laid_out = FileLayout(archive, of_storage)
    module: Any = SimpleNamespace(Pickler=_pickler(of_leaf, of_storage, placeholders))
    save: Any = torch.serialization._save
    save(state, laid_out, module, _PROTOCOL, False)
    return laid_out


def _pickler(
    of_leaf: Mapping[int, int], of_storage: Mapping[int, int], placeholders: Placeholders
) -> type[pickle.Pickler]:
    """Return what pickles leaves by what stands for them.

    Args:
        of_leaf, of_storage: numbers of the sources, by the `id` of sharded leaves, and by the
            identity of the storages of plain ones.
    """
    made, reduced = placeholders.made, placeholders.reduced

    class PlaceholderPickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, torch.Tensor | FlatShard | LeafSpec):
                return NotImplemented
            number = of_leaf.get(id(obj), -1)
            if number in reduced:
                return reduced[number]
            if isinstance(obj, LeafSpec) and number in made:
                return _reduced(_joined(obj, made[number]))
            if is_sharded(obj):
                raise ValueError(
                    "a sharded tensor is in an object that is not a dict, list or tuple; pass "
                    f"its state_dict(), or the tensor under a key of a dict: {obj!r}"
                )
            if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
                stored = of_storage.get(obj.untyped_storage()._cdata, -1)
                return _reduced(_on_host(obj, made.get(stored)))
            return NotImplemented

    return PlaceholderPickler


def _joined(like: LeafSpec, storage: Any) -> torch.Tensor:
    """Return the plain tensor that is pickled for one of a merged state.

    Args:
        storage: what stands for its storage.
    """
    _, _, offset, stride = like.storage or (0, 0, 0, ())
    tensor = _view(storage, like.spec.dtype, offset, like.spec.shape, stride)
    if like.is_parameter:
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor.requires_grad_(like.requires_grad)


def _on_host(tensor: torch.Tensor, storage: Any | None) -> torch.Tensor:
    """Return a plain tensor of a device as if it were on the host.

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
    return host.requires_grad_(tensor.requires_grad)


def _view(
    storage: Any, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    found = torch.empty(0, dtype=dtype, device="cpu")
    return found.set_(storage, offset, shape, stride)


def _reduced(tensor: Any) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)
