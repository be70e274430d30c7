"""Nests: what dictionaries, lists and tuples hold, at any depth.

What runs code of the user's when it is read (a configuration that resolves its entries, a proxy
that builds an object at the first access) is a value, which nothing here reads. So what a value is
depends on its type, never on its attributes.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fastserial.interrupts import ours

Path = tuple[Any, ...]  # keys, from the outermost container's inwards
PLAIN_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, tuple})
_READING = ("__iter__", "__getitem__", "keys", "values", "items")  # methods that read a container
# What a container of another type is looked into for, beside objects. `distributed` adds its own.
leaf_types: set[type] = {torch.Tensor}


def is_container(value: object) -> bool:
    """Return whether a value is a dictionary, a list or a tuple.

    One of the user's own types is a container if it is read as Python's own are. A type that reads
    in another way (`tensordict`) is one only where it holds a tensor, or an object with a state.
    """
    kind = type(value)
    return kind in _PLAIN_CONTAINERS or _reads_plainly(kind) or _holds_leaves(value)


def _reads_plainly(kind: type) -> bool:
    """Return whether instances of a type are read by the methods of `dict`, `list` or `tuple`."""
    for base in (OrderedDict, dict, list, tuple):
        if issubclass(kind, base):
            return all(getattr(kind, name, None) is getattr(base, name, None) for name in _READING)
    return False


def _holds_leaves(value: Any) -> bool:
    """Return whether a container of an uncommon type holds a tensor or an object with a state."""
    seen: set[int] = set()

    def holds(value: Any) -> bool:
        kind = type(value)
        if kind in PLAIN_VALUES:
            return False
        if issubclass(kind, tuple(leaf_types)) or is_object(value):
            return True
        if not issubclass(kind, Mapping | list | tuple) or id(value) in seen:
            return False
        seen.add(id(value))
        return any(holds(item) for _, item in items_of(value))

    if not issubclass(type(value), Mapping | list | tuple):
        return False
    try:
        return any(holds(item) for _, item in items_of(value))
    except ours(Exception):  # such as an entry that cannot be resolved; torch pickles it as it is
        return False


def is_object(value: object) -> bool:
    """Return whether a value has a state that can be loaded into it, as modules have."""
    kind = type(value)
    methods = getattr(kind, "state_dict", None), getattr(kind, "load_state_dict", None)
    return all(map(callable, methods))


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a container."""
    is_mapping = issubclass(type(container), Mapping)
    return list(container.items() if is_mapping else enumerate(container))


def walk(nest: Any, *, once: bool = False, objects: bool = False) -> Iterator[tuple[Path, Any]]:
    """Yield a value and what it holds, each with its path; containers before their items.

    Numbers, texts and the like in containers are left out. A container that holds itself ends
    there.

        for path, value in walk({"parts": [weight, 3]}):
            ...  # (), the nest; ("parts",), the list; ("parts", 0), weight

    Args:
        once: each container is looked into once, wherever it is.
        objects: also those that have a state of their own (`is_object`).
    """
    seen: set[int] = set()

    def visit(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        yield path, value
        if not is_container(value) or id(value) in seen:
            return
        if not objects and is_object(value):
            return
        items = items_of(value)
        if all(type(item) in PLAIN_VALUES for _, item in items):
            return
        seen.add(id(value))
        for key, item in items:
            if type(item) not in PLAIN_VALUES:
                yield from visit(item, (*path, key))
        if not once:
            seen.discard(id(value))

    return visit(nest, ())


def shown(path: Path, before: str = "") -> str:
    """Return a path as text, such as `parts['a'][0]`.

    Args:
        before: where the nest is.
    """
    keys = [f"[{key!r}]" for key in path]
    if keys and not before:
        keys[0] = str(path[0])
    return before + "".join(keys)


def rebuilt(container: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with what a function makes of its items."""
    return with_items(container, [change(item) for _, item in items_of(container)])


def replaced(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nest with what a function makes of the values in it, and of the nest itself.

    A container in which nothing changes is the same object; what is shared stays shared, and a
    container that holds itself keeps itself.

    Args:
        change: returns what replaces a value; the value itself: it is looked into.
    """
    done: dict[int, tuple[Any, Any]] = {}  # what became of containers, with them

    def visit(value: Any) -> Any:
        if type(value) in PLAIN_VALUES:
            return value
        new = change(value)
        if new is not value or not is_container(value):
            return new
        if id(value) not in done:
            done[id(value)] = value, value
            before = [item for _, item in items_of(value)]
            items = list(map(visit, before))
            if any(map(operator.is_not, items, before)):
                done[id(value)] = value, with_items(value, items)
        return done[id(value)][1]

    return visit(nest)


def with_items(container: Any, items: list[Any]) -> Any:
    """Return a container of the same type, and with the same keys, with other items.

    Of a mapping that is no `dict` it is a dictionary: a copy may share its items with the original.
    """
    kind = type(container)
    if not issubclass(kind, Mapping):
        return sequence_like(container, items)
    changed: Any = copy.copy(container) if issubclass(kind, dict) else {}
    for (key, _), item in zip(items_of(container), items, strict=True):
        changed[key] = item
    return changed


def sequence_like(value: Any, items: list[Any]) -> Any:
    """Return a list or tuple of a value's type, with other items."""
    if isinstance(value, list):
        changed = copy.copy(value)
        changed[:] = items
        return changed
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
