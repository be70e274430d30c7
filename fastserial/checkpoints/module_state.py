"""What a module's `state_dict()` gives, and what of it is not the module's own memory.

Extra states, metrics and modules with a `state_dict` of their own give copies, or values that are
no tensors. Filling those in place would reach nobody: they go through `load_state_dict`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fastserial.errors import ConvertError

__all__ = ["ModuleState"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Spot = tuple[torch.device, int]


class ModuleState:
    """The state of a module while it is filled.

    Attributes:
        entries: what `state_dict()` gave.
        loose: keys of `entries` that are not in the module's memory.
        unpickled: those of them whose values only the pickle gives; see `divide`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.entries: dict[str, Any] = dict(_state_of(module))
        known, spots = _memory_of(module)
        self.loose = [
            key
            for key, value in self.entries.items()
            if id(value) not in known and _spot(value) not in spots
        ]
        self.unpickled: list[str] = []

    def divide(self, fits: Callable[[str, torch.Tensor], bool]) -> None:
        """Tell copies that can be filled by reading, for which `fits` is true, from the rest."""
        self.unpickled = [
            key
            for key in self.loose
            if type(self.entries[key]) not in _PLAIN or not fits(key, self.entries[key])
        ]

    def readable(self) -> dict[str, Any]:
        """Return the entries that are filled by reading."""
        rest = set(self.unpickled)
        return {key: value for key, value in self.entries.items() if key not in rest}

    def unpickle(self, fd: int, path: str, prefix: str) -> dict[str, str]:
        """Get the values that only the pickle gives, by torch's `weights_only` rules.

        Args:
            fd: a descriptor of the file.
            path: its name.
            prefix: the part of the checkpoint that is used.

        Returns:
            Why there is no value, for each key without one; the entry is dropped.

        Raises:
            CorruptCheckpointError: the file is damaged.
        """
        from fastserial.checkpoints.convert import part_of
        from fastserial.checkpoints.mapped import map_checkpoint

        reasons: dict[str, str] = {}
        part: Any = None
        if self.unpickled:
            try:
                part = part_of(map_checkpoint(fd, path).value, prefix)
            except ConvertError as error:
                reasons = dict.fromkeys(
                    self.unpickled, f"only load_state_dict can load it: {error}"
                )
        for key in self.unpickled:
            if isinstance(part, Mapping) and key in part:
                self.entries[key] = copy.deepcopy(part[key])  # the file may go away
            else:
                del self.entries[key]
                reasons.setdefault(key, "")
        return reasons

    def hand_over(self, strict: bool, missing: list[str]) -> list[str]:
        """Give the module what is not in its memory; return the keys that it did not take.

        Args:
            strict: as for `load_state_dict`.
            missing: keys without a partner in the checkpoint, which are left alone.

        Raises:
            RuntimeError: as `load_state_dict`.
        """
        dropped = set(self.loose).intersection(missing)
        state = {key: value for key, value in self.entries.items() if key not in dropped}
        given = [key for key in self.loose if key in state]
        if not given:
            return []
        load: Any = self._module.load_state_dict
        found = load(state, strict=strict) if _takes(load, "strict") else load(state)
        refused = set(getattr(found, "unexpected_keys", ()))
        return [key for key in given if key in refused]


def _state_of(module: torch.nn.Module) -> Mapping[str, Any]:
    if _takes(module.state_dict, "keep_vars"):
        return module.state_dict(keep_vars=True)
    return module.state_dict()


def _takes(method: Callable[..., Any], name: str) -> bool:
    taken = inspect.signature(method).parameters
    return name in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())


def _memory_of(module: torch.nn.Module) -> tuple[set[int], set[_Spot | None]]:
    """Return the module's tensors by identity, and where their storages are."""
    held = [tensor for one in module.modules() for tensor in _tensors_of(one)]
    return {id(tensor) for tensor in held}, {_spot(tensor) for tensor in held} - {None}


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for group in (module._parameters, module._buffers, vars(module)):
        for value in group.values():
            if isinstance(value, torch.Tensor):
                yield value


def _spot(value: Any) -> _Spot | None:
    """Return where a tensor's storage is, None of what has no memory."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        place = value.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return (value.device, place) if place else None
