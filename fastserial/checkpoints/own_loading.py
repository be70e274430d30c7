"""Loads that only a module's own `load_state_dict` can do: it converts older files, by hooks."""

from __future__ import annotations

import enum
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fastserial.checkpoints.lazy import open_checkpoint
from fastserial.checkpoints.load import load
from fastserial.config import Config, options
from fastserial.errors import LoadMismatchError
from fastserial.interrupts import ours

_LOADING = ("_load_from_state_dict", "load_state_dict")


class Conversion(enum.IntEnum):
    """What may change the entries of a file while a module loads them."""

    NONE = 0
    TORCHS = 1  # adds, renames or reshapes entries: nothing where keys and shapes are the module's
    USERS = 2  # may do anything


def conversion_of(module: Module) -> Conversion:
    """Return what may change a file's entries: methods that are overridden, and hooks."""
    return max((_conversion(one) for one in _loading_code(module)), default=Conversion.NONE)


def _loading_code(module: Module) -> Iterator[Callable[..., Any]]:
    for one in module.modules():
        for name in _LOADING:
            method = vars(one).get(name) or getattr(type(one), name)
            if method is not getattr(Module, name):
                yield method
        yield from one._load_state_dict_pre_hooks.values()
        yield from one._load_state_dict_post_hooks.values()


def _conversion(function: Any) -> Conversion:
    return Conversion.TORCHS if is_torchs(function) else Conversion.USERS


def is_torchs(function: Any) -> bool:
    """Return whether a method or a hook is torch's own code."""
    function = getattr(function, "hook", function)  # torch wraps hooks that get the module
    while isinstance(function, partial):
        function = function.func
    home: str = getattr(function, "__module__", None) or type(function).__module__
    return home.partition(".")[0] == "torch"


def load_state(module: Module, state: Mapping[str, Any], strict: bool) -> tuple[Any, Any]:
    """Call a module's `load_state_dict`; return the keys that are missing, and those not used.

    Args:
        strict: as `Module.load_state_dict`.

    Raises:
        LoadMismatchError: torch's `load_state_dict` refuses the entries; some may be loaded.
        Exception: of the user's own code.
    """
    more = {} if strict else {"strict": False}  # the user's own method may not take it
    try:
        found: Any = module.load_state_dict(state, **more)
    except ours(RuntimeError) as error:
        if type(error) is not RuntimeError or not is_torchs(module.load_state_dict):
            raise
        raise LoadMismatchError(
            f"the checkpoint does not fit this {type(module).__name__}: {error}"
        ) from error
    # None: the user's own method
    return ([], []) if found is None else (found.missing_keys, found.unexpected_keys)


def versions_in(state: Any) -> Any:
    """Return the versions of a module's parts that a state dict has; None if it has none."""
    return getattr(state, "__dict__", {}).get("_metadata")  # runs no `__getattr__`


def load_by_module(
    module: Module,
    path: str | os.PathLike[str],
    container: str,
    key: str,
    strict: bool,
    config: Config,
) -> tuple[list[str], list[str]]:
    """Load a part of a file by a module's own `load_state_dict`, as after `torch.load`.

    Args:
        module: what is filled.
        path: the file.
        container: its format.
        key: the part of it; empty: all of it.
        strict: as `Module.load_state_dict`.
        config: options of the load.

    Returns:
        The keys that are missing, and those that are not used.

    Raises:
        LoadMismatchError: torch's `load_state_dict` refuses the entries; some may be loaded.
        UnpicklingError: it needs more than `weights_only` allows.
        CorruptCheckpointError: the file is damaged.
        OSError: it cannot be read.
    """
    value: Any
    if container == "safetensors":
        with open_checkpoint(path) as file:
            value = {name: file.get_tensor(name) for name in file}
    else:
        own = {name: getattr(config, name) for name in Config.__slots__ if name != "safetensors"}
        with options(**own):
            value = load(path, map_location="cpu", weights_only=True)
    missing, unexpected = load_state(module, _part(value, key), strict)
    return list(missing), list(unexpected)


def _part(value: Any, key: str) -> dict[str, Any]:
    """Return the state dict under a key, with the versions of its modules.

    Args:
        value: what the file holds.
        key: names of entries, joined by dots; the last may be the beginning of a flat name.
    """
    rest = f"{key}." if key else ""
    while rest and isinstance(value, Mapping):
        names = [name for name in value if type(name) is str and rest.startswith(f"{name}.")]
        if not names:
            break
        name = max(names, key=len)
        value, rest = value[name], rest[len(name) + 1 :]
    if not isinstance(value, Mapping):
        raise LoadMismatchError(f"under key={key!r} is a {type(value).__name__}, not a state_dict")
    state: OrderedDict[str, Any] = OrderedDict(
        (name[len(rest) :] if rest else name, item)
        for name, item in value.items()
        if not rest or (type(name) is str and name.startswith(rest))
    )
    versions = versions_in(value)
    if versions is not None:
        inside = {
            f"{name}."[len(rest) :]: one
            for name, one in versions.items()
            if f"{name}.".startswith(rest)
        }
        state._metadata = {name.removesuffix("."): one for name, one in inside.items()}  # type: ignore[attr-defined]
    return state


def is_scalar_for(target: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether torch takes a stored tensor of one element for one without dimensions."""
    return not is_lazy(target) and target.dim() == 0 and shape == (1,)


def is_in_memory(module: Module, state: Mapping[str, Any]) -> bool:
    """Return whether a state has tensors of the module only: to fill them is to fill it."""
    spots = {
        _spot(value)
        for one in module.modules()
        for group in (one._parameters, one._buffers, vars(one))
        for value in group.values()
        if isinstance(value, torch.Tensor)
    }
    spots.add(None)
    return all(isinstance(one, torch.Tensor) and _spot(one) in spots for one in state.values())


def _spot(tensor: Any) -> tuple[torch.device, int] | None:
    """Return device and address of a tensor's storage, None if it has no memory."""
    if is_lazy(tensor):
        return None
    try:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        address = local.untyped_storage().data_ptr()
    except ours(NotImplementedError, RuntimeError):
        return None
    return (local.device, address) if address else None


def why_not_filled(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be filled in place; None if it can."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return "only plain tensors can be filled in place"
    if tensor.device.type == "meta":
        return "it has no memory yet (device meta): use to_empty() first"
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and step == 0 for size, step in steps):
        return "several of its elements are one in memory (expand): clone() it first"
    return None
