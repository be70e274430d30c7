"""The tensors of a checkpoint, found among the symbols of its pickle.

Nested dictionaries, lists, objects and modules contribute their keys, joined by dots:
`model.layers.0.weight`, `optimizer.state.3.exp_avg`.

Each container is looked at once, however often it is mentioned, and what is in it is counted. Only
what leads to a tensor gets a name, and each name is charged to the budget before it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from fastserial.errors import CheckpointFileError, CorruptCheckpointError, PickleLimitError
from fastserial.formats.pickles import (
    Budget,
    Call,
    Decoded,
    Elided,
    Global,
    Limits,
    Mapping,
    Persistent,
    decode,
    refuse_costly,
)
from fastserial.formats.source import Source
from fastserial.formats.tensors import (
    ITEM_BYTES,
    LARGEST,
    MOST_DIMENSIONS,
    PACKED,
    StorageEntry,
    TensorEntry,
    dtype_name,
    element_count,
    storage_entry,
    storage_table,
    storage_view,
)
from fastserial.formats.zip_format import (
    PICKLE,
    Directory,
    RecordEntry,
    most_inflated,
    read_record,
    record_stream,
)
from fastserial.interrupts import ours

_MOST_NOTES = 100
_MOST_METADATA = 64  # torch writes two
_DEEPEST_TUPLE = 64  # in a key
_LONGEST_NUMBER = 4096  # bits; to write out one of many takes long

# What is charged for, in bytes of memory.
_STORAGE_COST = 512  # a persistent id
_NODE_COST = 256  # a container
_PART_COST = 112  # a container or a storage in it
_CHARACTER_COST = 8  # of a key
_TENSOR_COST = 1000  # as `inspect` keeps it
_ERROR_COST = 10_000  # a tensor that makes no sense: whose error it is takes a while to find out
_DIMENSION_COST = 256  # each after the first four, in JSON
_FREE_DIMENSIONS = 4
_DEFLATED_PICKLE = 3  # a compressed pickle may cost as one of so many times its bytes in the file

_QUANTIZED = "torch._utils._rebuild_qtensor"
_STRIDED = {
    "torch._utils._rebuild_tensor": None,
    "torch._utils._rebuild_tensor_v2": None,
    "torch._utils._rebuild_tensor_v3": 6,  # which argument is the dtype
    _QUANTIZED: None,
}
_METADATA = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
_PARAMETERS = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
_FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type")
_NO_STORAGE = {
    "torch._utils._rebuild_meta_tensor_no_storage": 0,  # which argument is the dtype
    "torch._utils._rebuild_wrapper_subclass": 1,
}


@dataclass(slots=True)
class Outline:
    """What a checkpoint's pickle says.

    Attributes:
        tensors: in the order of the pickle.
        storages: by key.
        users: for each storage, the keys of the tensors (or bare storages) in it.
        globals: the names that unpickling would import.
        values: how many other values there are (numbers, strings, ...).
        problems: what is wrong with single tensors, by key.
        unread: why only `torch.load` can load a tensor (conjugated, a dtype of a later torch), by
            key.
        complete: False if the limits ended the search.
    """

    tensors: list[TensorEntry] = field(default_factory=list)
    storages: dict[str, StorageEntry] = field(default_factory=dict)
    users: dict[str, list[str]] = field(default_factory=dict)
    globals: frozenset[Global] = frozenset()
    values: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    complete: bool = True

    @property
    def notes(self) -> list[str]:
        """Why tensors are not in `tensors`, a sentence for each of the first."""
        found = self.problems | self.unread
        notes = [
            f"tensor {key or '(root)'}: {why}" for key, why in islice(found.items(), _MOST_NOTES)
        ]
        if len(found) > _MOST_NOTES:
            notes.append(f"and {len(found) - _MOST_NOTES} more tensors that are not listed")
        return notes


def outline(decoded: Decoded, budget: Budget | None = None) -> Outline:
    """Find the tensors in a pickle that was read.

    Args:
        budget: that of `decode`; once it is spent, no more tensors get a name.

    Raises:
        CorruptCheckpointError: its persistent ids make no sense.
        PickleLimitError: the budget is spent before all containers are looked at.
    """
    budget = budget or Budget()
    budget.spend(_STORAGE_COST * len(decoded.persistents))
    found = Outline(storages=storage_table(decoded.persistents), globals=decoded.globals)
    root = _Node(None)
    root.add(_HERE, decoded.value)
    nodes = _survey(root, budget)
    found.values = root.values
    try:
        found.complete = _name_tensors(root, nodes, found, budget)
    except ours(PickleLimitError):
        found.complete = False
    return found


# -- what leads to tensors -------------------------------------------------------------------------


class _Part(NamedTuple):
    """A container or a storage in a container: its name there; what it is if it is a tensor."""

    name: Any
    value: Any
    kind: str


class _Node:
    """A container, and what is in it.

    Attributes:
        container: itself.
        parts: what may lead to tensors.
        values: how many other values it leads to (numbers, strings, ...).
        is_tensor: it is a call that makes a tensor.
        problem: why what is in it is not known.
    """

    __slots__ = ("container", "is_tensor", "parts", "problem", "values")

    def __init__(self, container: Any) -> None:
        self.container = container
        self.parts: list[_Part] = []
        self.values = 0
        self.is_tensor = False
        self.problem: CorruptCheckpointError | None = None

    @property
    def leads_to_tensors(self) -> bool:
        return bool(self.parts) or self.is_tensor or self.problem is not None

    def add(self, name: Any, value: Any, kind: str = "tensor") -> None:
        """Note a value that is in it."""
        if _is_part(value):
            self.parts.append(_Part(name, value, kind))
        elif type(value) not in _PARTS:
            self.values += 1


_HERE = object()  # as a name: the key is that of the container
_CONTAINERS = frozenset({Call, Mapping, list, tuple})
_PARTS = _CONTAINERS | {Persistent}


def _is_part(value: Any) -> bool:
    """Return whether a value may lead to tensors: an empty container does not."""
    if type(value) is Mapping:
        return bool(value.items)
    return bool(value) if type(value) in (list, tuple) else type(value) in _PARTS


def _survey(root: _Node, budget: Budget) -> dict[int, _Node]:
    """Look at each container once, and drop the parts that lead to no tensor.

    One that is in itself is taken to lead to some.

    Returns:
        What is in the containers, by their `id`.
    """
    nodes: dict[int, _Node] = {}
    open_nodes: set[int] = set()
    path = [(root, iter(root.parts))]
    while path:
        node, rest = path[-1]
        for part in rest:
            if type(part.value) is not Persistent and id(part.value) not in nodes:
                inner = nodes[id(part.value)] = _node_of(part.value, budget)
                if inner.parts:
                    open_nodes.add(id(part.value))
                    path.append((inner, iter(inner.parts)))
                    break
        else:
            path.pop()
            open_nodes.discard(id(node.container))
            _drop_others(node, nodes, open_nodes)
    return nodes


def _drop_others(node: _Node, nodes: dict[int, _Node], open_nodes: set[int]) -> None:
    """Keep the parts of a node that lead to tensors; count the values in all."""
    kept: list[_Part] = []
    for part in node.parts:
        inner = nodes.get(id(part.value))  # None: a storage
        if inner is None or id(part.value) in open_nodes:
            kept.append(part)
            continue
        node.values = min(node.values + inner.values, LARGEST)  # a list of lists of lists ...
        if inner.leads_to_tensors:
            kept.append(part)
    node.parts = kept


def _node_of(container: Any, budget: Budget) -> _Node:
    node = _Node(container)
    budget.spend(_NODE_COST)
    if type(container) is Call:
        try:
            _look_at_call(node, container, budget)
        except ours(CorruptCheckpointError) as error:
            node.problem, node.parts = error, []
    elif type(container) is Mapping:
        _look_at_items(node, container.items, budget)
    else:
        _look_at_list(node, container, budget)
    return node


def _look_at_list(node: _Node, values: Sequence[Any], budget: Budget) -> None:
    if _is_worth_a_look(node, values, budget):
        for index, value in enumerate(values):
            node.add(index, value)


def _look_at_items(node: _Node, items: Sequence[tuple[Any, Any]], budget: Budget) -> None:
    if _is_worth_a_look(node, list(map(itemgetter(1), items)), budget):
        for name, value in items:
            node.add(name, value)


def _is_worth_a_look(node: _Node, values: Sequence[Any], budget: Budget) -> bool:
    """Charge for the parts among values; return False if there are none.

    This is much faster than a look at each value: checkpoints hold lists of millions of numbers.
    """
    if _PARTS.isdisjoint(map(type, values)):
        node.values += len(values)
        return False
    budget.spend(_PART_COST * sum(map(_is_part, values)))
    return True


def _look_at_call(node: _Node, call: Call, budget: Budget) -> None:
    arguments = call.arguments
    name = str(call.function) if type(call.function) is Global else ""
    if name in _STRIDED:
        node.is_tensor = True
        if name == _QUANTIZED:
            for index, argument in enumerate(_tuple(arguments, 4)[4:], 4):
                budget.spend(_PART_COST)
                node.add(index, argument)
    elif name in _PARAMETERS:
        node.add(_HERE, _tuple(arguments, 1)[0], "parameter")
        _look_at_state(node, arguments[3:4], budget)
    elif name in _FROM_TYPE:
        function, kind, inner, state = _tuple(arguments, 4)[:4]
        budget.spend(_NODE_COST)
        node.add(_HERE, Call(function, inner), kind.name if type(kind) is Global else "tensor")
        _look_at_state(node, (state,), budget)
    elif name in _NO_STORAGE:
        node.is_tensor = True
    elif type(arguments) is tuple:
        _look_at_list(node, arguments, budget)
    _look_at_state(node, call.state, budget)
    _look_at_list(node, call.appended, budget)
    _look_at_items(node, call.items, budget)


def _look_at_state(node: _Node, states: Sequence[Any], budget: Budget) -> None:
    for state in states:
        # `__slots__` make it a pair of dictionaries
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        for part in parts:
            if type(part) is Mapping:
                _look_at_items(node, part.items, budget)
            elif part is not None:
                budget.spend(_PART_COST)
                node.add(_HERE, part)


# -- the names of tensors --------------------------------------------------------------------------


class _Frame(NamedTuple):
    """A container whose parts are named: its key, and those that are left."""

    key: str
    node: _Node
    rest: Iterator[_Part]


def _name_tensors(root: _Node, nodes: dict[int, _Node], found: Outline, budget: Budget) -> bool:
    """Add the tensors to an outline; return False if some are nested too deep.

    Raises:
        PickleLimitError: the budget is spent.
    """
    complete = True
    path = [_Frame("", root, iter(root.parts))]
    inside: set[int] = set()  # the containers on the path, which may hold themselves
    while path:
        frame = path[-1]
        part = next(frame.rest, None)
        if part is None:
            inside.discard(id(frame.node.container))
            path.pop()
            continue
        key = _join(frame.key, part.name, budget)
        if type(part.value) is Persistent:
            _bare_storage(key, part.value, found)
            continue
        if id(part.value) in inside:
            continue
        if len(path) > budget.limits.depth:
            complete = False
            continue
        node = nodes[id(part.value)]
        if node.problem is not None:  # not raised: its traceback would grow each time
            budget.spend(_TENSOR_COST)
            found.problems[key] = node.problem.message
            continue
        try:
            if node.is_tensor:
                budget.spend(_TENSOR_COST)
                _add_tensor(key, part.kind, node.container, found, budget)
        except ours(CorruptCheckpointError) as error:
            budget.spend(_ERROR_COST)
            found.problems[key] = error.message
        except _OnlyForTorchError as error:
            found.unread[key] = str(error)
        else:
            if node.parts:
                inside.add(id(part.value))
                path.append(_Frame(key, node, iter(node.parts)))
    return complete


def _join(key: str, name: Any, budget: Budget) -> str:
    """Return the key of what has a name in the container of a key.

    Raises:
        PickleLimitError: the budget is spent.
    """
    if name is not _HERE:
        text = _text(name, budget)
        budget.spend(_CHARACTER_COST * (len(key) + len(text) + 1))
        return f"{key}.{text}" if key else text
    budget.spend(_PART_COST)
    return key


def _text(name: Any, budget: Budget, depth: int = 0) -> str:
    """Return a name as `str` shows it; "?" for what may take forever to write out.

    Args:
        depth: how many tuples it is in.

    Raises:
        PickleLimitError: the budget is spent.
    """
    if type(name) is bytes:
        name = name.decode("utf-8", "backslashreplace")
    if type(name) is str:
        text = repr(name) if depth else name
    elif type(name) is tuple and depth < _DEEPEST_TUPLE:
        parts = [_text(part, budget, depth + 1) for part in name]
        text = f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    elif type(name) in (float, bool, Global, Elided) or name is None:
        text = str(name)
    else:
        text = str(name) if type(name) is int and name.bit_length() < _LONGEST_NUMBER else "?"
    budget.spend(_CHARACTER_COST * len(text) * bool(depth))
    return text


class _OnlyForTorchError(Exception):
    """Only `torch.load` can load a tensor; the text says why."""


def _bare_storage(key: str, symbol: Persistent, found: Outline) -> None:
    entry = storage_entry(symbol)
    if entry is not None:
        found.users.setdefault(entry.key, []).append(key)


def _add_tensor(key: str, kind: str, call: Call, found: Outline, budget: Budget) -> None:
    name = str(call.function)
    if name in _NO_STORAGE:
        _add_without_storage(key, kind, call, _NO_STORAGE[name], found, budget)
        return
    arguments = _tuple(call.arguments, 4)
    symbol, offset, shape, stride = arguments[:4]
    if type(symbol) is not Persistent or not _is_count(offset):
        raise CorruptCheckpointError("it has no storage, or no offset in it")
    storage = storage_entry(symbol)
    if storage is None:
        raise CorruptCheckpointError("it has no storage")
    at = _STRIDED[name]
    dtype: str | None = storage.dtype
    if at is not None:
        dtype = _dtype(arguments[at]) if at < len(arguments) else None
    kind = "quantized" if name == _QUANTIZED else kind
    offset += storage_view(symbol)
    entry = _entry(key, dtype, (shape, stride), storage.key, offset, kind, budget)
    start, stop = entry.span
    if stop > found.storages[storage.key].nbytes:
        raise CorruptCheckpointError(
            f"its bytes {start} to {stop} go past the end of storage "
            f"{storage.key}, which has {storage.nbytes}"
        )
    found.users.setdefault(storage.key, []).append(key)
    if _is_conjugated_or_negated(arguments, _METADATA.get(name, len(arguments))):
        raise _OnlyForTorchError("it is conjugated or negated: use torch.load")
    found.tensors.append(entry)


def _dtype(symbol: Any) -> str | None:
    if type(symbol) is Global and symbol.module == "torch" and dtype_name(symbol) is None:
        raise _OnlyForTorchError(
            f"fastserial does not know its dtype, {symbol.name}: use torch.load"
        )
    return dtype_name(symbol)


def _is_conjugated_or_negated(arguments: tuple[Any, ...], at: int) -> bool:
    """Return whether torch applies an operation to the elements when they are used."""
    metadata = arguments[at] if at < len(arguments) else None
    items = metadata.items if type(metadata) is Mapping else []
    return len(items) > _MOST_METADATA or any(
        type(name) is str and name in ("conj", "neg") and flag for name, flag in items
    )


def _add_without_storage(
    key: str, kind: str, call: Call, at: int, found: Outline, budget: Budget
) -> None:
    arguments = _tuple(call.arguments, 3)
    dtype, shape, stride = (*arguments[: at + 3], None)[at : at + 3]
    if at:
        kind = arguments[0].name if type(arguments[0]) is Global else kind
    found.tensors.append(_entry(key, _dtype(dtype), (shape, stride), None, 0, kind, budget))


def _entry(
    key: str,
    dtype: str | None,
    layout: tuple[Any, Any],
    storage: str | None,
    offset: int,
    kind: str,
    budget: Budget,
) -> TensorEntry:
    """Return a tensor; `layout` is shape and strides."""
    sizes, steps = map(_integers, layout)
    if dtype is None or len(sizes) != len(steps):
        raise CorruptCheckpointError("its dtype, shape and strides make no sense")
    budget.spend(_DIMENSION_COST * max(0, len(sizes) - _FREE_DIMENSIONS))
    count = element_count(sizes)
    if count is None:
        raise CorruptCheckpointError("its shape has 2^63 elements or more")
    nbytes = -(-count // PACKED.get(dtype, 1)) * ITEM_BYTES[dtype]
    return TensorEntry(key, dtype, sizes, steps, storage, offset, nbytes, kind)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _tuple(value: Any, length: int) -> tuple[Any, ...]:
    if type(value) is not tuple or len(value) < length:
        raise CorruptCheckpointError("it is not built as torch builds tensors")
    return value


def _integers(value: Any) -> tuple[int, ...]:
    if type(value) is Call and value.function == Global("torch", "Size"):
        value = _tuple(value.arguments, 1)[0]
    if type(value) in (tuple, list) and len(value) <= MOST_DIMENSIONS:
        sizes = tuple(value)
        if all(_is_count(n) for n in sizes):
            return sizes
    raise CorruptCheckpointError("its shape or strides are not whole numbers")


def _limits_of(record: RecordEntry) -> Limits:
    """Return the limits for a pickle in a zip: those for its size, unless it is compressed well."""
    return Limits.of(min(record.size, _DEFLATED_PICKLE * record.compressed_size))


def zip_outline(
    source: Source, directory: Directory, limits: Limits | None = None
) -> Outline | None:
    """Return what a zip checkpoint's pickle says of its tensors, None if it has no pickle.

    Args:
        limits: by default those for the pickle's size.

    Raises:
        CorruptCheckpointError: the pickle is damaged, or none that torch writes.
        PickleLimitError: it takes more than the limits allow.
        OSError: the file cannot be read.
    """
    records = [record for record in directory.records if record.name == PICKLE]
    if not records:
        return None
    record = records[0]
    if len({(one.size, one.crc) for one in records}) > 1:
        raise CorruptCheckpointError("several records have this name, and differ", record=PICKLE)
    try:
        budget = Budget(limits or _limits_of(record))
        decoded = decode(record_stream(source, record), budget)
        if limits is None:
            budget.narrow(decoded.nbytes)  # the rest of the record is no pickle
        found = outline(decoded, budget)
    except ours(CheckpointFileError) as error:
        if error.record is None:
            error.record = PICKLE
        raise
    by_name = {one.name: one for one in directory.records}
    for key, storage in found.storages.items():
        held = by_name.get(f"data/{key}")
        if held is not None:
            found.storages[key] = replace(
                storage,
                record=held.name,
                offset=held.data_offset if held.is_stored else None,
                held=held.size,
                crc=held.crc or None,
            )
    return found


def bounded_pickle(source: Source, record: RecordEntry) -> bytes:
    """Return a pickle that is to be unpickled: it takes no more than its place in the file allows.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is compressed, and larger than `most_inflated`.
        PickleLimitError: it would take too much memory, or end the process.
        OSError: the file cannot be read.
    """
    data = read_record(source, record, max(record.compressed_size, most_inflated(source.size)))
    refuse_costly(data, _limits_of(record))
    return data
