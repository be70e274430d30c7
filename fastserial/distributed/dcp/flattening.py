"""A nested state as torch's planner flattens it, without making the keys anew in each save.

The keys depend on the containers alone: these are compared with those of earlier saves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

__all__ = ["Path", "flattened"]

Path = tuple[str | int, ...]
# What a container holds: its keys, or how many items a list has; and what is below each of them,
# None for a value. Instead of a None for every one of them there is one for all.
Outline = tuple[tuple[str, ...] | int, tuple[Any, ...] | None]
_DICTS = {dict, OrderedDict}
_VALUE, _MAPPING, _LIST, _TENSOR, _SHARDED = range(5)


def flattened(state: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path], bool]:
    """Return the values of a nest, where in it they are, and whether a `ShardedTensor` may be one.

    Mappings are looked into, and lists that hold a tensor or a mapping somewhere. A value's key is
    its path, joined by dots.

    Raises:
        ValueError: two values get the same key.
    """
    if getattr(_version, "_derived_version", None) is not None:  # as old releases of torch did it
        return *flatten_state_dict(dict(state)), True
    found = _Walk()
    keys, paths = _named(found.outline(state))
    values = dict(zip(keys, found.values, strict=True))
    return values, paths.copy(), _SHARDED in found.kinds.values()


class _Walk:
    """Collects the values of a state."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.kinds: dict[type, int] = {}

    def outline(self, container: Any) -> Outline:
        """Add the values below a container; return what it holds."""
        keys: tuple[str, ...] | int
        if isinstance(container, list):
            keys, values = len(container), container
        else:
            keys, values = _items(container)
        kinds = self.kinds
        for kind in set(map(type, values)).difference(kinds):
            kinds[kind] = _kind_of(kind)
        if all(kinds[kind] not in (_MAPPING, _LIST) for kind in set(map(type, values))):
            self.values += values
            return keys, None
        below: list[Outline | None] = []
        for value in values:
            what = kinds[type(value)]
            if what == _MAPPING or (what == _LIST and _is_looked_into(value)):
                below.append(self.outline(value))
            else:
                below.append(None)
                self.values.append(value)
        return keys, tuple(below)


def _items(mapping: Mapping[Any, Any]) -> tuple[tuple[str, ...], list[Any]]:
    if type(mapping) in _DICTS:
        keys, values = tuple(mapping), list(mapping.values())
    else:
        items = list(mapping.items())
        keys, values = tuple([key for key, _ in items]), [value for _, value in items]
    if not set(map(type, keys)) <= {str}:
        keys = tuple(map(str, keys))
    return keys, values


def _kind_of(kind: type) -> int:
    if issubclass(kind, torch.Tensor):
        return _SHARDED if issubclass(kind, ShardedTensor) else _TENSOR
    if issubclass(kind, Mapping):
        return _MAPPING
    return _LIST if issubclass(kind, list) else _VALUE


def _is_looked_into(value: list[Any]) -> bool:
    """Return whether a list has tensors or mappings in it, or such lists."""
    for item in value:
        kind = _kind_of(type(item))
        if kind not in (_VALUE, _LIST) or (kind == _LIST and _is_looked_into(item)):
            return True
    return False


@lru_cache(maxsize=4)
def _named(outline: Outline) -> tuple[list[str], dict[str, Path]]:
    """Return the keys of the values in an outline, and their paths.

    Raises:
        ValueError: two values get the same key.
    """
    paths: dict[str, Path] = {}
    for path in _paths(outline, ()):
        key = ".".join(map(str, path))
        if key in paths:
            raise ValueError(f"duplicated flatten key {key}")
        paths[key] = path
    return list(paths), paths


def _paths(outline: Outline, above: Path) -> Iterator[Path]:
    names, below = outline
    keys: Iterable[str | int] = range(names) if isinstance(names, int) else names
    if below is None:
        for key in keys:
            yield *above, key
        return
    for key, inner in zip(keys, below, strict=True):
        if inner is None:
            yield *above, key
        else:
            yield from _paths(inner, (*above, key))
