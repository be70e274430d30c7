"""What a checkpoint is made of: the user's objects, their states, and back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fastserial.errors import LoadMismatchError
from fastserial.overlap.guard import storages_of_optimizer
from fastserial.overlap.watch import all_storages

__all__ = ["expected_bytes", "plain", "put", "restore", "state_of", "states", "steady"]


def states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each object; what has none is its own."""
    return {name: state_of(value) for name, value in objects.items()}


def restore(objects: Mapping[str, Any], found: Mapping[str, Any], path: str) -> None:
    """Put states into the objects: plain values into the mapping, tensors into the tensors.

    Raises:
        LoadMismatchError: the checkpoint has others.
    """
    if missing := sorted(objects.keys() - found.keys()):
        raise LoadMismatchError(f"{path}: it holds no state of {', '.join(missing)}")
    for name in objects:
        put(objects, name, found[name], path)


def put(objects: Mapping[str, Any], name: str, state: Any, path: str) -> None:
    """Put one state into its object.

    Raises:
        LoadMismatchError: it does not fit.
    """
    target = plain(objects[name])
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(state)
    elif isinstance(target, torch.Tensor):
        if target is state:
            return
        if target.shape != state.shape:
            raise LoadMismatchError(
                f"{path}: {name} has the shape {tuple(state.shape)}, not {tuple(target.shape)}"
            )
        with torch.no_grad():
            target.copy_(state)
    elif isinstance(objects, MutableMapping):
        objects[name] = state
    else:
        raise LoadMismatchError(f"{path}: {name} cannot be put back: state is no dictionary")


def steady(objects: Mapping[str, Any]) -> set[int]:
    """Return the identities of the storages that change in an optimizer's step only.

    These are what optimizers own. A forward pass changes buffers; and whatever else there is may
    change at any time, as averages do.
    """
    storages: set[int] = set()
    for value in objects.values():
        if isinstance(value, torch.optim.Optimizer):
            storages.update(storages_of_optimizer(value))
    for value in objects.values():
        if isinstance(value, torch.nn.Module):
            storages.difference_update(all_storages(value.buffers()))
    return storages


def expected_bytes(objects: Mapping[str, Any]) -> int:
    """Return how many bytes optimizers will have that make their state in the first step."""
    nbytes = 0
    for value in objects.values():
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            each = 2 if "betas" in value.defaults else bool(value.defaults.get("momentum"))
            parameters = [one for group in value.param_groups for one in group["params"]]
            nbytes += each * sum(one.numel() * one.element_size() for one in parameters)
    return nbytes


def plain(value: Any) -> Any:
    """Return the module that `torch.compile` and DDP wrap: files are the same with and without.

    Other values are returned as they are.
    """
    while isinstance(value, torch.nn.Module):
        name = "module" if isinstance(value, DistributedDataParallel) else "_orig_mod"
        inner = getattr(value, name, None)
        if not isinstance(inner, torch.nn.Module):
            break
        value = inner
    return value


def state_of(value: Any) -> Any:
    """Return the state of an object; what has none is its own."""
    value = plain(value)
    return value.state_dict() if hasattr(value, "state_dict") else value
