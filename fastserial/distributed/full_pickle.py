"""torch pickles a sharded state as if it were whole, and we keep where every byte goes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fastserial.distributed.facts import numbers_of
from fastserial.distributed.flat_shard import FlatShard
from fastserial.distributed.joined import Joined
from fastserial.distributed.kept_pickle import outline_of
from fastserial.distributed.laid_out import Entry, LaidOut
from fastserial.distributed.pieces import TensorSpec, as_dtensor
from fastserial.distributed.tables import Source, Table, is_plain
from fastserial.distributed.untouched import Untouched

__all__ = ["lay_out"]

_PROTOCOL = 2  # torch.save's default


class _Archive:
    """Stands where torch's PyTorchFileWriter stands: takes the records, and writes nothing."""

    def __init__(self, archive: str, table: Table, made: dict[int, int]) -> None:
        self.entries: list[Entry] = []
        self.rest: list[torch.UntypedStorage] = []
        self._archive = archive
        self._table = table
        self._made = made

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
        number = self._made.get(storage.data_ptr())
        if number is None:
            number = self._table.by_storage.get(storage._cdata)
        if number is None:
            self.rest.append(storage)
            number = -len(self.rest)
        return number


def lay_out(archive: str, state: object, table: Table, keep: bool) -> LaidOut:
    """Let torch pickle a state with its sharded tensors as whole ones.

    Args:
        archive: the name that torch puts before the records' names.
        table: of the state.
        keep: whether the next save may use the layout.

    Raises:
        Exception: whatever pickling the object raises.
    """
    nbytes = sum(source.spec.nbytes for source in table.sources)
    untouched = Untouched(nbytes, len(table.sources))
    try:
        made: dict[int, int] = {}
        picklers: list[Any] = []
        stand_ins = _stand_ins(table, untouched, made)
        writer = _Archive(archive, table, made)
        module: Any = SimpleNamespace(Pickler=_pickler(table, stand_ins, picklers))
        save: Any = torch.serialization._save
        save(state, writer, module, _PROTOCOL, False)
        found = LaidOut(archive, writer.entries)
        found.rest = writer.rest
        keep = keep and not writer.rest
        outline = (
            outline_of(state, numbers_of([leaf for _, leaf in table.leaves])) if keep else None
        )
        if outline is not None:
            memo = picklers[0].memo.copy()
            if memo.keys() >= outline.before.keys():
                found.remember(outline, {key: memo[key][0] for key in outline.before})
        return found
    finally:
        untouched.close()


def _stand_ins(
    table: Table, untouched: Untouched, made: dict[int, int]
) -> dict[int, torch.Tensor | torch.UntypedStorage]:
    """Return the tensor or storage that is pickled in place of each source that is not as it is.

    Args:
        made: gets the number of the source, by the address of what stands in for it.
    """
    found: dict[int, torch.Tensor | torch.UntypedStorage] = {}
    for number, source in enumerate(table.sources):
        leaf = source.leaf
        joined = isinstance(leaf, Joined)
        if leaf.told.storage is not None if joined else is_plain(leaf):
            if not joined and leaf.device.type == "cpu":
                continue
            found[number] = stand_in = untouched.storage(source.spec.nbytes)
            address = stand_in.data_ptr()
        else:
            found[number] = tensor = _whole(source, untouched)
            address = tensor.data_ptr()
        if source.spec.nbytes:
            made[address] = number
    return found


def _whole(source: Source, untouched: Untouched) -> torch.Tensor:
    spec: TensorSpec = source.spec
    whole = untouched.tensor(spec.shape, spec.dtype)
    leaf = source.leaf.told if isinstance(source.leaf, Joined) else source.leaf
    if not isinstance(leaf, FlatShard) and leaf.requires_grad:
        whole.requires_grad_()
    return whole


def _pickler(table: Table, stand_ins: Mapping[int, Any], made: list[Any]) -> type[pickle.Pickler]:
    class Pickler(pickle.Pickler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, torch.Tensor | FlatShard | Joined):
                return NotImplemented
            number = table.by_leaf.get(id(obj))
            if isinstance(obj, Joined) and number is not None:
                return _joined(obj, stand_ins[number]).__reduce_ex__(_PROTOCOL)
            if number is not None:
                return stand_ins[number].__reduce_ex__(_PROTOCOL)
            if isinstance(obj, FlatShard) or as_dtensor(obj) is not None:
                raise ValueError(
                    "a sharded tensor is within an object that is no dict, list or tuple; the "
                    f"ranks cannot look into it: {obj!r}"
                )
            if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
                return _on_host(obj, table, stand_ins)
            return NotImplemented

    return Pickler


def _joined(joined: Joined, stand_in: Any) -> Any:
    """Return the tensor that is pickled for one of a merged state."""
    told = joined.told
    if isinstance(stand_in, torch.Tensor) or told.storage is None:
        return stand_in
    _, _, offset, stride = told.storage
    tensor = torch.empty(0, dtype=told.dtype, device="cpu")
    tensor.set_(stand_in, offset, told.shape, stride)
    if told.is_parameter:
        return torch.nn.Parameter(tensor, told.requires_grad)
    return tensor.requires_grad_(told.requires_grad)


def _on_host(
    tensor: torch.Tensor,
    table: Table,
    stand_ins: Mapping[int, Any],
) -> Any:
    """Return how a plain tensor of a device is pickled as if it were on the host."""
    number = table.by_storage.get(tensor.untyped_storage()._cdata)
    storage: Any = tensor.untyped_storage()
    storage = stand_ins[number] if number is not None else storage.cpu()
    host: Any = torch.empty(0, dtype=tensor.dtype, device="cpu")
    host.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return host.requires_grad_(tensor.requires_grad).__reduce_ex__(_PROTOCOL)
