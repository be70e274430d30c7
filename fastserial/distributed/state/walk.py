"""The leaves of a nest of containers, and modules and optimizers as state dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastserial.distributed.sharding.flat_shard import FlatShard
from fastserial.distributed.sharding.pieces import as_dtensor
from fastserial.distributed.state.merging import MergedTensor
from fastserial.distributed.state.states import module_of, state_of_module, state_of_optimizer
from fastserial.errors import ConfigError
from fastserial.nests import is_container, is_object, items_of, rebuilt, walk, with_items
from fastserial.overlap.watch import all_storages

__all__ = [
    "Leaves",
    "buffers_of",
    "is_leaf",
    "is_live",
    "is_sharded",
    "leaves",
    "live",
    "states",
]

# Dictionaries whose keys name things. A Counter is a value as a whole, as is a dictionary without
# tensors that has other keys than these, or more than anybody would give names to.
_NAMING = (dict, OrderedDict)
_NAMES = {str, int}
_MOST_NAMES = 4096
# Kinds; modules may be containers, too. Others with a state are what torch calls stateful, as
# schedulers are.
_LEAF, _CONTAINER, _LIVE, _STATEFUL = 1, 2, 4, 8


def is_leaf(value: object) -> bool:
    """Return whether a value's bytes are shared among the ranks: a tensor or a FlatShard."""
    return isinstance(value, torch.Tensor | FlatShard | MergedTensor)


def is_live(value: object) -> bool:
    """Return whether a value is a module or an optimizer."""
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def is_sharded(leaf: object) -> bool:
    """Return whether a rank may hold a part of a leaf only."""
    return isinstance(leaf, FlatShard) or as_dtensor(leaf) is not None


class Leaves(Sequence[tuple[str, Any]]):
    """The tensors of a nest, each with its key path such as `model.layers[0].weight`.

    Paths are put together when they are asked for: of thousands that takes milliseconds.

    Attributes:
        values: the tensors.
        keys: where they are, to be compared: for some tensors each, what their paths begin with
            and how they go on.
        others: likewise, where dictionaries have what is no tensor.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.keys: list[tuple[str, list[str]]] = []
        self.others: list[tuple[str, list[str]]] = []
        self._paths: list[str] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self.paths, self.values, strict=True)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(zip(self.paths[index], self.values[index], strict=True))
        return self.paths[index], self.values[index]

    @property
    def paths(self) -> list[str]:
        """The paths."""
        if self._paths is None:
            self._paths = [before + key for before, keys in self.keys for key in keys]
        return self._paths

    def add(self, before: str, keys: list[str], values: Iterable[Any]) -> None:
        """Add tensors that are in one container."""
        self.keys.append((before, keys))
        self.values += values


def leaves(obj: object) -> Leaves:
    """Return the tensors of a nest.

    Dicts, lists and tuples of all kinds are looked into, each once, whatever else holds a tensor
    is not.
    """
    found = Leaves()
    if is_leaf(obj):
        found.add("", ["the object"], [obj])
    elif is_container(obj):
        _collect("", obj, set(), {}, found)
    return found


def _collect(path: str, value: Any, seen: set[int], kinds: dict[type, int], found: Leaves) -> None:
    """Add the leaves below a container; `kinds` as for `_kinds_of`."""
    if id(value) in seen:
        return
    seen.add(id(value))
    keys, values = _items(value)
    there = _kinds_of(values, kinds)
    more = any(kind & (_LEAF | _CONTAINER) for kind in there)
    named = type(value) in _NAMING and (more or _are_names(keys))
    if not (more or named):
        return
    if isinstance(value, Mapping):
        before = f"{path}." if path else ""
        if set(map(type, keys)) - {str}:
            keys = [f"{key}" for key in keys]
        if named and there != {_LEAF}:
            pairs = zip(keys, values, strict=True)
            found.others.append((before, [key for key, one in pairs if kinds[type(one)] != _LEAF]))
        if not more:
            return
    else:
        before = f"{path}["
        keys = [f"{key}]" for key in keys]
    if there == {_LEAF}:
        found.add(before, keys, values)
        return
    for key, item in zip(keys, values, strict=True):
        kind = kinds[type(item)]
        if kind == _LEAF:
            found.add(before, [key], [item])
        elif kind & _CONTAINER:
            _collect(f"{before}{key}", item, seen, kinds, found)


def _are_names(keys: list[Any]) -> bool:
    return len(keys) <= _MOST_NAMES and set(map(type, keys)) <= _NAMES


def _kinds_of(values: Collection[Any], kinds: dict[type, int]) -> set[int]:
    """Return of which kinds values are; enter the kinds of their types.

    A state has thousands of values of few types: their types are found without a loop in Python.
    """
    examples = dict(zip(map(type, values), values, strict=True))
    for kind in examples.keys() - kinds.keys():
        kinds[kind] = _kind_of(examples[kind])
    return {kinds[kind] for kind in examples}


def _kind_of(value: object) -> int:
    if is_leaf(value):
        return _LEAF
    kind = _CONTAINER * is_container(value) + _LIVE * is_live(value)
    return kind or _STATEFUL * is_object(value)


def _items(container: Any) -> tuple[list[Any], list[Any]]:
    """Return the keys and values of a container.

    Mappings tell them together: iterating over one that is of no common kind may give others.
    """
    if type(container) in (dict, OrderedDict):
        return list(container), list(container.values())
    if isinstance(container, Mapping):
        items = list(container.items())
        return [key for key, _ in items], [value for _, value in items]
    values = list(container)
    return list(range(len(values))), values


def live(value: object) -> list[Any]:
    """Return the modules and optimizers of a nest, each once.

    Raises:
        ConfigError: it holds another object with a state, which no load could fill.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    kinds: dict[type, int] = {}
    below: list[Collection[Any]] = [(value,)]
    for values in below:  # which grows
        if not any(kind & ~_LEAF for kind in _kinds_of(values, kinds)):
            continue
        for one in values:
            kind = kinds[type(one)]
            if kind & _STATEFUL:
                raise ConfigError(_stateful(value, one))
            if kind & _LIVE:
                found[id(one)] = one
            if kind & _CONTAINER and id(one) not in seen:
                seen.add(id(one))
                below.append(list(one.values()) if isinstance(one, Mapping) else one)
    return list(found.values())


def _stateful(nest: Any, wanted: Any) -> str:
    """Return why an object in a nest cannot be saved or filled, with the path to it."""
    path = next(
        (path for path, value in walk(nest, once=True, objects=True) if value is wanted), ()
    )
    name = ".".join(map(str, path)) or "the object"
    return (
        f"{name} is a {type(wanted).__name__}, of which ranks save and load the state only: give "
        "its state_dict(), and call its load_state_dict() with what was loaded"
    )


def states(obj: object, found: list[Any]) -> Any:
    """Return a nest with the state dicts of its modules and optimizers in their places.

    Names are canonical and fully qualified, shards stay shards. Without a module or optimizer it
    is the object itself, as every container in it is that holds none.

    Args:
        found: its modules and optimizers (`live`).

    Raises:
        ConfigError: an optimizer comes without what names its parameters.
    """
    if not found:
        return obj
    modules = [one for one in found if isinstance(one, torch.nn.Module)]
    return _replaced(obj, {id(one): _state(one, modules, obj) for one in found}, {})


def buffers_of(found: list[Any]) -> set[int]:
    """Return the identities of the storages of the buffers of modules."""
    modules = [one for one in found if isinstance(one, torch.nn.Module)]
    return {storage for one in modules for storage in all_storages(one.buffers())}


def _replaced(value: Any, made: Mapping[int, Any], done: dict[int, Any]) -> Any:
    """Return a container with its modules and optimizers replaced; itself if it has none.

    Args:
        made: what replaces them, by their `id`.
        done: what became of containers. One that is on the way stays as it is in itself.
    """
    if id(value) in made:
        return made[id(value)]
    if not is_container(value):
        return value
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value
    before = [item for _, item in items_of(value)]
    items = [_replaced(item, made, done) for item in before]
    if any(new is not old for new, old in zip(items, before, strict=True)):
        done[id(value)] = with_items(value, items)
    return done[id(value)]


def _state(value: Any, modules: list[torch.nn.Module], nest: object) -> Any:
    if isinstance(value, torch.nn.Module):
        return _rebuilt(state_of_module(value))
    return _rebuilt(state_of_optimizer(module_of(value, modules, nest), value))


def _rebuilt(value: Any) -> Any:
    """Return a state dict in the containers that torch gives a full one, each shard by itself."""
    if isinstance(value, dict):
        return {key: _rebuilt(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return rebuilt(value, _rebuilt)
    return value.detach() if as_dtensor(value) is not None else value
