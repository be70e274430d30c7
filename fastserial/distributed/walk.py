"""The leaves of a nest of containers, and modules and optimizers as state dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fastserial.distributed.flat_shard import FlatShard
from fastserial.distributed.joined import Joined
from fastserial.distributed.pieces import as_dtensor

__all__ = ["is_leaf", "is_sharded", "leaves", "optimizers", "states"]


def is_leaf(value: object) -> bool:
    """Return whether a value's bytes are shared among the ranks: a tensor or a FlatShard."""
    return isinstance(value, torch.Tensor | FlatShard | Joined)


def is_sharded(leaf: object) -> bool:
    """Return whether a rank may hold a part of a leaf only."""
    return isinstance(leaf, FlatShard) or as_dtensor(leaf) is not None


def leaves(obj: object) -> Iterator[tuple[str, Any]]:
    """Return the tensors of a nest, each with its key path such as `model.layers[0].weight`.

    Dicts, lists and tuples of all kinds are looked into, each once, whatever else holds a tensor
    is not.
    """
    yield from _leaves("", obj, set())


def _leaves(path: str, value: object, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if is_leaf(value):
        yield path or "the object", value
        return
    if not isinstance(value, Mapping | list | tuple) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item, seen)
    else:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item, seen)


def states(obj: object) -> Any:
    """Return a nest with the state dicts of its modules and optimizers in their places.

    Names are canonical and fully qualified, shards stay shards. Without a module or optimizer it
    is the object itself.

    Raises:
        ValueError: an optimizer comes without the module whose parameters it has.
    """
    found = list(_stateful(obj, set()))
    if not found:
        return obj
    modules = [value for value in found if isinstance(value, torch.nn.Module)]
    made: dict[int, Any] = {}

    def state_of(value: Any) -> Any:
        if id(value) not in made:
            made[id(value)] = _state(value, modules)
        return made[id(value)]

    return _replaced(obj, state_of)


def optimizers(obj: object) -> Iterator[torch.optim.Optimizer]:
    """Return the optimizers of a nest."""
    for value in _stateful(obj, set()):
        if isinstance(value, torch.optim.Optimizer):
            yield value


def _stateful(value: object, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        yield value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _stateful(item, seen)


def _replaced(value: Any, state_of: Callable[[Any], Any]) -> Any:
    """Return a container with its modules and optimizers replaced; itself if it has none."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return state_of(value)
    if not isinstance(value, Mapping | list | tuple) or not any(_stateful(value, set())):
        return value
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)
        for key, item in value.items():
            changed[key] = _replaced(item, state_of)
        return changed
    items = [_replaced(item, state_of) for item in value]
    if isinstance(value, list):
        changed = copy.copy(value)
        changed[:] = items
        return changed
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _state(value: Any, modules: list[torch.nn.Module]) -> Any:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    if isinstance(value, torch.nn.Module):
        return _rebuilt(get_model_state_dict(value))
    return _rebuilt(get_optimizer_state_dict(module_of(value, modules), value))


def _rebuilt(value: Any) -> Any:
    """Return a state dict in the containers that torch gives a full one, each shard by itself."""
    if isinstance(value, dict):
        return {key: _rebuilt(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rebuilt(item) for item in value)
    return value.detach() if as_dtensor(value) is not None else value


def module_of(optimizer: torch.optim.Optimizer, modules: list[torch.nn.Module]) -> torch.nn.Module:
    """Return the module whose parameters an optimizer has.

    Raises:
        ValueError: there is none.
    """
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules:
        if wanted <= {id(p) for p in module.parameters()}:
            return module
    raise ValueError(
        "an optimizer is saved and loaded together with its module, which names its parameters: "
        '{"model": model, "optimizer": optimizer}'
    )
