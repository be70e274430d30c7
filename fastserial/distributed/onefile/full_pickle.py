"""torch pickles a sharded state as if it were whole, and we keep where every byte goes."""

from __future__ import annotations

import pickle
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from fastserial.distributed.onefile.laid_out import Entry, LaidOut
from fastserial.distributed.sharding.flat_shard import FlatShard
from fastserial.distributed.sharding.pieces import as_dtensor
from fastserial.distributed.state.merging import Joined
from fastserial.distributed.state.tables import Table, is_plain
from fastserial.memory.untouched import Untouched

__all__ = ["StandIns"]

_PROTOCOL = 2  # torch.save's default
# Types of most of what is in a pickle. torch asks each object whether it is a storage, which takes
# as long as the rest.
_NO_STORAGES = frozenset(
    {type(None), bool, int, float, str, bytes, tuple, list, dict, OrderedDict, FunctionType, type}
)


class StandIns:
    """What torch pickles in the place of tensors that no rank holds as a whole.

    They are made of a table, and do for every state whose table is the same (`facts`). None of a
    state's own tensors is kept.
    """

    def __init__(self, table: Table, values: Sequence[Any]) -> None:
        """Make them.

        Args:
            values: the leaves of the state.

        Raises:
            OSError: there are not as many addresses.
        """
        untouched = Untouched(sum(spec.nbytes for spec in table.specs), len(table.specs))
        weakref.finalize(self, untouched.close)
        self._sources = table.of_leaves
        self._plain = [not isinstance(leaf, Joined) and is_plain(leaf) for leaf in values]
        self._numbers: dict[int, int] = {}  # of the sources, by the address of what stands for them
        self._made = _made_for(table, values, untouched, self._numbers)
        # As torch's pickler takes them apart, which is half of what pickling them takes.
        self._reduced = {
            number: _reduced(made)
            for number, made in self._made.items()
            if isinstance(made, torch.Tensor)
        }

    def lay_out(self, archive: str, state: object, values: Sequence[Any]) -> LaidOut:
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
            if number < 0:
                continue
            if plain:
                of_storage[leaf.untyped_storage()._cdata] = number
            else:
                of_leaf[id(leaf)] = number
        writer = _Archive(archive, self._numbers, of_storage)
        module: Any = SimpleNamespace(Pickler=self._pickler(of_leaf, of_storage))
        save: Any = torch.serialization._save
        save(state, writer, module, _PROTOCOL, False)
        return LaidOut(archive, writer.entries, writer.rest)

    def _pickler(
        self, of_leaf: Mapping[int, int], of_storage: Mapping[int, int]
    ) -> type[pickle.Pickler]:
        """Return what pickles leaves with sources, given by their `id`, by what stands for them."""
        reduced, made = self._reduced, self._made

        class Pickler(pickle.Pickler):
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
                if not isinstance(obj, torch.Tensor | FlatShard | Joined):
                    return NotImplemented
                if isinstance(obj, Joined) and number is not None:
                    return _reduced(_joined(obj, made[number]))
                if isinstance(obj, FlatShard) or as_dtensor(obj) is not None:
                    raise ValueError(
                        "a sharded tensor is within an object that is no dict, list or tuple; the "
                        f"ranks cannot look into it: {obj!r}"
                    )
                if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
                    return _on_host(obj, made.get(of_storage.get(_storage_of(obj), -1)))
                return NotImplemented

        return Pickler


class _Archive:
    """Stands where torch's PyTorchFileWriter stands: takes the records, and writes nothing."""

    def __init__(
        self, archive: str, numbers: Mapping[int, int], of_storage: Mapping[int, int]
    ) -> None:
        self.entries: list[Entry] = []
        self.rest: list[torch.UntypedStorage] = []
        self._archive = archive
        self._numbers = numbers
        self._of_storage = of_storage

    def archive_name(self) -> str:
        return self._archive

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes | bytearray | memoryview):
            self.entries.append(Entry(name, size, bytes(data[:size]), None))
        else:
            self.entries.append(Entry(name, size, None, self._source_of(data) if size else None))

    def _source_of(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage.data_ptr())
        if number is None:
            number = self._of_storage.get(storage._cdata)
        if number is None:
            self.rest.append(storage)
            number = -len(self.rest)
        return number


def _made_for(
    table: Table, values: Sequence[Any], untouched: Untouched, numbers: dict[int, int]
) -> dict[int, torch.Tensor | torch.UntypedStorage]:
    """Return the tensor or storage that is pickled in place of each source that is not as it is.

    Args:
        numbers: gets the number of the source, by the address of what stands for it.
    """
    found: dict[int, torch.Tensor | torch.UntypedStorage] = {}
    for number, (spec, first) in enumerate(zip(table.specs, table.firsts, strict=True)):
        leaf = values[first]
        joined = isinstance(leaf, Joined)
        if leaf.told.storage is not None if joined else is_plain(leaf):
            if not joined and leaf.device.type == "cpu":
                continue
            found[number] = made = untouched.storage(spec.nbytes)
            address = made.data_ptr()
        else:
            whole = untouched.tensor(spec.shape, spec.dtype)
            like = leaf.told if joined else leaf
            if not isinstance(like, FlatShard) and like.requires_grad:
                whole.requires_grad_()
            found[number] = whole
            address = whole.data_ptr()
        if spec.nbytes:
            numbers[address] = number
    return found


def _joined(joined: Joined, storage: Any) -> Any:
    """Return the plain tensor that is pickled for one of a merged state.

    Args:
        storage: what stands for its storage.
    """
    told = joined.told
    if told.storage is None:
        raise ValueError(f"{told} has no storage")
    _, _, offset, stride = told.storage
    tensor = torch.empty(0, dtype=told.dtype, device="cpu")
    tensor.set_(storage, offset, told.shape, stride)
    if told.is_parameter:
        return torch.nn.Parameter(tensor, told.requires_grad)
    return tensor.requires_grad_(told.requires_grad)


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _reduced(tensor: Any) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)


def _on_host(tensor: torch.Tensor, storage: Any | None) -> Any:
    """Return how a plain tensor of a device is pickled as if it were on the host.

    Args:
        storage: what stands for its storage, if anything does.
    """
    own: Any = tensor.untyped_storage()
    host: Any = torch.empty(0, dtype=tensor.dtype, device="cpu")
    host.set_(
        own.cpu() if storage is None else storage,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )
    return _reduced(host.requires_grad_(tensor.requires_grad))
