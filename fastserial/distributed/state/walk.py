"""The leaves of a nest of containers, and modules and optimizers as state dicts."""

from __future__ import annotations

import hashlib
import marshal
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fastserial.distributed.comm.call import STEPS
from fastserial.distributed.layout.flat_shard import FlatShard
from fastserial.distributed.layout.placement import as_dtensor
from fastserial.distributed.state.merging import LeafSpec, is_of_an_optimizer
from fastserial.distributed.state.states import (
    module_of,
    state_of_module,
    state_of_optimizer,
    versions_of,
)
from fastserial.errors import ConfigError
from fastserial.interrupts import ours
from fastserial.memory.storages import is_plain
from fastserial.nests import (
    PLAIN_VALUES,
    Path,
    is_container,
    is_object,
    leaf_types,
    rebuilt,
    replaced,
    walk,
)

# Dictionaries whose keys name things. A Counter is a value as a whole, as is a dictionary without
# tensors that has other keys than these, or more than anybody would give names to.
_NAMING = (dict, OrderedDict)
_NAMES = {str, int}
_MOST_NAMES = 4096
_SEQUENCES = frozenset({list, tuple})
_SHOWN = 60  # characters of a value in an error
_LEAF_TYPES = (torch.Tensor, FlatShard, LeafSpec)
leaf_types.update(_LEAF_TYPES)


def is_leaf(value: object) -> bool:
    """Return whether a value's bytes are shared among the ranks: a tensor or a FlatShard."""
    return isinstance(value, _LEAF_TYPES)


def is_live(value: object) -> bool:
    """Return whether a value is a module or an optimizer."""
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


# A value as ranks compare it: whether it must be the same on all of them; then as text, else its
# digest. None: it is not a number, a text or the like, nor a list of those.
PlainValue = tuple[bool, str] | None


@dataclass(slots=True)
class Leaves:
    """What is in a nest.

    Attributes:
        paths, values: its tensors, each with its key path such as `model.layers[0].weight`.
        of_optimizers: numbers of the tensors that are in the state of an optimizer.
        others: the dictionaries whose keys name things: how the paths of their entries begin, and
            those that are not tensors: their keys, each with its `PlainValue`.
        live: its modules and optimizers, each once.
    """

    paths: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    of_optimizers: set[int] = field(default_factory=set)
    others: list[tuple[str, dict[str, PlainValue]]] = field(default_factory=list)
    live: list[Any] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self.paths, self.values, strict=True)


def leaves(obj: object) -> Leaves:
    """Return what is in a nest.

    Containers (`fastserial.nests`) are looked into, each once; whatever else holds a tensor is not.

    Raises:
        ConfigError: it holds an object with a state that is no module and no optimizer.
    """
    if is_leaf(obj):
        return Leaves(["the object"], [obj])
    found = Leaves()
    # What the keys of containers are between in names; which part of an optimizer's state it is.
    around: dict[Path, tuple[str, str, str]] = {}
    seen: set[int] = set()
    for path, value in walk(obj, once=True, objects=True):
        before, after, part = around[path[:-1]] if path else ("", "", "")
        if is_leaf(value):
            if part:
                found.of_optimizers.add(len(found.paths))
            found.paths.append(f"{before}{path[-1]}{after}")
            found.values.append(value)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_live(value):
            found.live.append(value)
        elif not is_container(value) and is_object(value):
            raise ConfigError(_stateful(path, value))
        if not is_container(value):
            continue
        name = f"{before}{path[-1]}{after}" if path else ""
        if part == "optimizer" and path[-1] == "param_groups":
            part = "groups"
        elif not part and isinstance(value, Mapping) and is_of_an_optimizer(value):
            part = "optimizer"
        around[path] = f"{name}[", "]", part
        if isinstance(value, Mapping):
            start = f"{name}." if name else ""
            around[path] = start, "", part
            if type(value) in _NAMING and _names_things(value):
                items = ((key, item) for key, item in value.items() if not is_leaf(item))
                others = {f"{key}": _compared(key, item, part == "groups") for key, item in items}
                found.others.append((start, others))
    return found


def _compared(key: object, value: Any, is_setting: bool) -> PlainValue:
    """Return an entry as ranks compare it.

    Args:
        is_setting: it is of a group of an optimizer's parameters.
    """
    kind: type = type(value)
    if kind in _SEQUENCES:
        if not {type(item) for item in value} <= PLAIN_VALUES | _SEQUENCES:
            return None
    elif kind not in PLAIN_VALUES:
        return None
    try:
        text = marshal.dumps(value, 2)
    except ours(ValueError):  # lists in it hold something else
        return None
    digest = hashlib.sha256(text).hexdigest()
    if not is_setting and not (kind is int and key in STEPS):
        return False, digest
    shown = repr(value)
    return True, shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}… ({digest[:8]})"


def _names_things(mapping: Mapping[Any, Any]) -> bool:
    """Return whether the keys of a dictionary are names."""
    if len(mapping) <= _MOST_NAMES and {type(key) for key in mapping} <= _NAMES:
        return True
    others = [value for value in mapping.values() if type(value) not in PLAIN_VALUES]
    return any(test(one) for one in others for test in (is_leaf, is_container, is_live, is_object))


def _stateful(path: Path, value: object) -> str:
    """Return why an object with a state cannot be saved or filled."""
    return (
        f"{'.'.join(map(str, path)) or 'the object'} is a {type(value).__name__}, of which ranks "
        "save and load the state only: give its state_dict(), and call its load_state_dict() with "
        "what was loaded"
    )


def states(obj: object, found: list[Any], versions: bool = False) -> Any:
    """Return a nest with the state dicts of its modules and optimizers instead of them.

    Names are canonical and fully qualified, shards stay shards. Without a module or optimizer it
    is the object itself, as every container in it is that holds none.

    Args:
        found: its modules and optimizers.
        versions: with the versions of modules, as `state_dict()` has them; torch's full
            `get_model_state_dict` has none.

    Raises:
        ConfigError: no module beside an optimizer names its parameters.
    """
    if not found:
        return obj
    modules = [one for one in found if isinstance(one, torch.nn.Module)]
    made = {id(one): _state(one, modules, obj, versions) for one in found}
    return replaced(obj, lambda value: made.get(id(value), value))


def buffers_of(found: list[Any]) -> set[int]:
    """Return the identities of the storages of the buffers of modules."""
    modules = [one for one in found if isinstance(one, torch.nn.Module)]
    buffers = [buffer for one in modules for buffer in one.buffers()]
    plain = (one for one in buffers if not is_lazy(one) and is_plain(one))  # no DTensors
    return {one.untyped_storage()._cdata for one in plain}


def _state(value: Any, modules: list[torch.nn.Module], nest: object, versions: bool) -> Any:
    if isinstance(value, torch.nn.Module):
        state = state_of_module(value)
        made, found = _rebuilt(state), versions_of(value, state) if versions else None
        if found is not None:
            made = OrderedDict(made)
            made._metadata = found  # type: ignore[attr-defined]
        return made
    return _rebuilt(state_of_optimizer(module_of(value, modules, nest), value))


def _rebuilt(value: Any) -> Any:
    """Return a state dict in the containers that torch gives a full one, each shard by itself."""
    if isinstance(value, dict):
        return {key: _rebuilt(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return rebuilt(value, _rebuilt)
    return value.detach() if as_dtensor(value) is not None else value
