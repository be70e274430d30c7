"""Modules and optimizers while they are filled: their state dicts, and the way back.

torch's own functions name the parameters. What is a module's own memory is filled in place; if that
is not all of its state, `set_model_state_dict` gets it when the bytes are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastserial.distributed.pieces import as_dtensor
from fastserial.distributed.walk import module_of

__all__ = ["LiveState"]


class LiveState:
    """The state of a module or an optimizer.

    Attributes:
        entries: of a module, what its state dict holds; of an optimizer, the state of its
            parameters by their names. A new optimizer has made its state.
    """

    def __init__(
        self, value: torch.nn.Module | torch.optim.Optimizer, modules: list[torch.nn.Module]
    ) -> None:
        """Get the state.

        Raises:
            ValueError: an optimizer comes without the module whose parameters it has.
        """
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        self._optimizer: torch.optim.Optimizer | None = None
        self._groups: list[Any] = []
        self._loose = False
        if isinstance(value, torch.optim.Optimizer):
            self._module = module_of(value, modules)
            self._optimizer = value
            state: Any = get_optimizer_state_dict(self._module, value)
            self.entries: dict[str, Any] = state["state"]
            self._groups = state["param_groups"]
            return
        self._module = value
        self.entries = dict(get_model_state_dict(value))
        known = {_memory(tensor) for tensor in _own_tensors(value)}
        self._loose = any(
            not isinstance(entry, torch.Tensor) or _memory(entry) not in known
            for entry in self.entries.values()
        )

    @property
    def is_optimizer(self) -> bool:
        """Whether it is the state of an optimizer."""
        return self._optimizer is not None

    def take_groups(self, groups: Any) -> dict[str, Any] | None:
        """Take the file's parameter groups for the optimizer's own.

        Returns:
            What the file calls the parameters, where it numbers them as `Optimizer.state_dict`
            does; None if they are not as many as here.
        """
        mine, self._groups = self._groups, groups
        numbers = [key for group in groups for key in group.get("params", ())]
        if not numbers or not all(isinstance(key, int) for key in numbers):
            return {}
        names = [list(group["params"]) for group in mine]
        if [len(group["params"]) for group in groups] != [len(group) for group in names]:
            return None
        for group, own in zip(groups, names, strict=True):
            group["params"] = own
        return dict(zip((name for own in names for name in own), numbers, strict=True))

    def give_back(self) -> None:
        """Hand over what is not the module's or the optimizer's own memory."""
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        if self._optimizer is not None:
            state: Any = {"state": self.entries, "param_groups": self._groups}
            set_optimizer_state_dict(self._module, self._optimizer, state)
        elif self._loose:
            set_model_state_dict(self._module, dict(self.entries))


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    sharded = as_dtensor(tensor)
    local = sharded._local_tensor if sharded is not None else tensor
    return local.device, local.untyped_storage().data_ptr()
