"""Nests: what dictionaries, lists and tuples of all kinds hold, at any depth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[Any, ...]  # keys, from the outermost container's inwards
PLAIN_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes})


def is_container(value: object) -> bool:
    """Return whether a value is a dictionary, a list or a tuple of any kind."""
    return isinstance(value, Mapping | list | tuple)


def is_object(value: object) -> bool:
    """Return whether a value has a state that can be loaded into it, as modules have."""
    methods = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    return all(map(callable, methods)) and not isinstance(value, type)


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a container."""
    return list(container.items() if isinstance(container, Mapping) else enumerate(container))


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


def with_items(container: Any, items: list[Any]) -> Any:
    """Return a container of the same type, and with the same keys, with other items."""
    if not isinstance(container, Mapping):
        return sequence_like(container, items)
    changed: Any = copy.copy(container)
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
