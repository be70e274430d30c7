"""Modules wrapped by `torch.compile` and DDP: their names in files are those without wrappers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel


def plain(value: Any) -> Any:
    """Return the module inside of wrappers; other values unchanged."""
    while (name := _inner(value)) is not None:
        value = getattr(value, name)
    return value


def state_of_module(module: Module) -> Any:
    """Return `module.state_dict()` with the names of wrappers left out."""
    pairs = _wrappers(module)

    def outer(name: str) -> str:
        for outside, inside in reversed(pairs):
            if name.startswith(inside):
                name = outside + name.removeprefix(inside)
        return name

    return _renamed(module.state_dict(), outer) if pairs else module.state_dict()


def state_to_module(module: Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a state of `state_of_module` into a module, which may be wrapped in another way.

    Args:
        strict: as `Module.load_state_dict`.
    """
    pairs = _wrappers(module)

    def inner(name: str) -> str:
        for outside, inside in pairs:
            if name.startswith(outside):
                name = inside + name.removeprefix(outside)
        return name

    more = {} if strict else {"strict": False}  # the user's own method may not take it
    module.load_state_dict(_renamed(state, inner) if pairs else state, **more)


def _inner(value: Any) -> str | None:
    """Return the attribute of a wrapper that is its module; None if it is not a wrapper."""
    if isinstance(value, DistributedDataParallel):
        return "module"
    return "_orig_mod" if type(value).__name__ == "OptimizedModule" else None


def _wrappers(module: Module) -> list[tuple[str, str]]:
    """Return the prefixes of wrapped modules, without and with the wrapper; outer ones first."""
    found = module.named_modules(remove_duplicate=False)
    return [
        (f"{name}.", f"{name}.{attribute}.")
        for name, one in found
        if name and (attribute := _inner(one)) is not None
    ]


def _renamed(state: Any, rename: Callable[[str], str]) -> Any:
    """Return a state dict with other names, in the versions of its modules (`_metadata`), too."""
    renamed = copy.copy(state)
    renamed.clear()
    for name, value in state.items():
        renamed[rename(name)] = value
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        items = [(rename(f"{name}.")[:-1], one) for name, one in versions.items()]
        renamed._metadata = OrderedDict(items)
    return renamed
