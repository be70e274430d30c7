"""Modules and optimizers as state dicts, and back.

torch's own functions name the parameters. What is a module's own memory is filled in place; if that
is not all of its state, or the user has hooks or methods for it, `load_state_dict` is called when
the bytes are read.

An optimizer without a state torch would make take a step: Adam would count it, momentum would begin
with zeros, and training would not be what it is without a checkpoint. It is left as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fastserial.checkpoints.own_loading import (
    Conversion,
    conversion_of,
    is_in_memory,
    is_torchs,
    load_state,
    versions_in,
)
from fastserial.distributed.layout.placement import as_dtensor
from fastserial.errors import ConfigError, LoadMismatchError
from fastserial.interrupts import ours
from fastserial.nests import walk

_ENTRIES = {"state", "param_groups"}  # of an optimizer's state dict


class _UnsteppedOptimizer:
    """An optimizer for functions that would create its state if there is none."""

    state = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def state_of_module(module: nn.Module) -> dict[str, Any]:
    """Return a module's state by canonical names; shards stay shards.

    Raises:
        ConfigError: its shards are `ShardedTensor`s.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    if next(_own_tensors(module), None) is None and not module.state_dict():
        return {}  # such as a loss, which torch refuses
    state = get_model_state_dict(module)
    for name, value in state.items():
        # Looked up by name: to import the class warns that it is deprecated.
        if type(value).__name__ == "ShardedTensor":
            raise ConfigError(
                f"{name} is a ShardedTensor, as FullyShardedDataParallel (FSDP1) has them without "
                "a device mesh. Pass it device_mesh=init_device_mesh(...), so that they are "
                "DTensors, or use FSDP2 (fully_shard)"
            )
    return state


def state_of_optimizer(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by the canonical names of its parameters, and change nothing.

    Raises:
        ConfigError: its ranks keep their parts of the state to themselves, or its `state_dict` has
            a form of its own.
    """
    if not _entries_of(optimizer) >= _ENTRIES:
        raise ConfigError(
            f"{type(optimizer).__name__}.state_dict() has a form of its own, without names of "
            "parameters: give its state_dict(), and call its load_state_dict() with what was "
            "loaded. Checkpointer does so, unless parameters are sharded"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError(
            "a ZeroRedundancyOptimizer does not say what each rank has of its state: shard with "
            "torch.distributed.fsdp.fully_shard instead, or call consolidate_state_dict(0) on all "
            "ranks and save its state_dict() by torch.save on rank 0"
        )
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    asked: Any = [optimizer if optimizer.state else _UnsteppedOptimizer(optimizer)]
    return get_optimizer_state_dict(module, asked)


def has_own_form(optimizer: Optimizer) -> bool:
    """Return whether only an optimizer's own methods know its state (Lookahead).

    Shards of a state need names: of an optimizer with sharded parameters, entries that torch's
    optimizers do not have are left out, as by `get_optimizer_state_dict`.
    """
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    sharded = any(as_dtensor(one) is not None for one in parameters)
    return not sharded and _entries_of(optimizer) != _ENTRIES


def _entries_of(optimizer: Optimizer) -> Set[str]:
    """Return the keys of an optimizer's state dict."""
    if is_torchs(type(optimizer).state_dict):
        return _ENTRIES
    return set(optimizer.state_dict())


def module_of(optimizer: Optimizer, modules: list[nn.Module], nest: object) -> nn.Module:
    """Return a module that names the parameters of an optimizer.

    It is the one that has them all, or one made of those modules and tensors of the nest that the
    optimizer has parameters of, under their keys: `actor.0.weight`, `log_alpha`.

    Raises:
        ConfigError: a parameter is in no module of the nest, and is no tensor of it.
    """
    wanted = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for module in modules:
        if wanted.keys() <= {id(p) for p in module.parameters()}:
            return module
    joined = nn.Module()
    where = ""
    for path, found in walk(nest, once=True, objects=True):
        name = "/".join(map(str, path))  # a dot would be one between a module and its parameter
        if found is optimizer:
            where = name
        name += "_" * hasattr(joined, name)  # such as `train`
        if isinstance(found, nn.Module):
            if not wanted.keys().isdisjoint(id(p) for p in found.parameters()):
                joined._modules[name] = found
        elif id(found) in wanted:
            joined._parameters[name] = found
    known = {id(p) for p in joined.parameters()}
    for number, parameter in wanted.items():
        if number not in known:
            raise ConfigError(
                f"the optimizer {where!r} ({type(optimizer).__name__}) has a parameter of shape "
                f"{tuple(parameter.shape)} that is in no module of what is saved or loaded with "
                "it, which would name it. Put the module, or the parameter itself, beside the "
                'optimizer: {"model": model, "log_alpha": log_alpha, "optimizer": optimizer}'
            )
    return joined


class LiveState:
    """The state of a module or an optimizer while it is filled.

    Attributes:
        entries: of a module, what its state dict holds; of an optimizer, the state of its
            parameters by their names, without empty ones (a `defaultdict` that was asked).
        parameters: of an optimizer, by their names.
        conversion: of a module: what may change the entries of a file while they are loaded.
    """

    def __init__(
        self, value: nn.Module | Optimizer, modules: list[nn.Module], nest: object
    ) -> None:
        """Get the state.

        Raises:
            ConfigError: no module beside an optimizer names its parameters.
        """
        self._optimizer: Optimizer | None = None
        self._groups: list[Any] = []
        self._loose = False
        self.entries: dict[str, Any]
        self.parameters: dict[str, torch.Tensor] = {}
        self.conversion = Conversion.NONE
        self._has_versions = False
        self._keys: Set[str] | None = None  # before `replace`
        if isinstance(value, Optimizer):
            self._module = module_of(value, modules, nest)
            self._optimizer = value
            state = state_of_optimizer(self._module, value)
            self.entries = {name: entry for name, entry in state["state"].items() if entry}
            self._groups = state["param_groups"]
            names = chain.from_iterable(group["params"] for group in self._groups)
            own = chain.from_iterable(group["params"] for group in value.param_groups)
            self.parameters = dict(zip(names, own, strict=False))
            return
        self._module = value
        state = state_of_module(value)
        self.entries = dict(state)
        self._versions: Any = versions_in(state)
        self.conversion = conversion_of(value)
        self._loose = not is_in_memory(value, self.entries)
        self._loose |= self.conversion is Conversion.USERS

    @property
    def is_optimizer(self) -> bool:
        """Whether it is the state of an optimizer."""
        return self._optimizer is not None

    def take_groups(self, groups: Any) -> dict[str, Any] | None:
        """Take the file's parameter groups for the optimizer's own.

        Returns:
            What the file calls the parameters that it knows, where it numbers them as
            `Optimizer.state_dict` does; None if they are not as many as here.

        Raises:
            ValueError: parameters of one group here have different settings in the file.
        """
        mine, self._groups = self._groups, groups
        numbers = [key for group in groups for key in group.get("params", ())]
        if not numbers or not all(isinstance(key, int) for key in numbers):
            self._groups = [_found_group(own, groups) for own in mine] if numbers else groups
            return {name: name for name in numbers}
        names = [list(group["params"]) for group in mine]
        if [len(group["params"]) for group in groups] != [len(group) for group in names]:
            return None
        for group, own in zip(groups, names, strict=True):
            group["params"] = own
        return dict(zip((name for own in names for name in own), numbers, strict=True))

    def make(self) -> bool:
        """Make the state of a new optimizer as torch does, with a step; False if that cannot be.

        The optimizer itself gets it in `apply`.
        """
        optimizer = self._optimizer
        if optimizer is None or any(self.entries.values()):
            return False
        if any(parameter.grad is not None for parameter in self.parameters.values()):
            return False
        optimizer.state.clear()  # of empty entries
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        made: Any = get_optimizer_state_dict(self._module, optimizer)["state"]
        self.entries.update(made)
        optimizer.state.clear()
        return True

    def take_versions(self, there: Any) -> None:
        """Take the versions of a module's parts from the file, as far as it has them.

        A file of `distributed.save` has none, as torch's full `get_model_state_dict` has none. If
        its keys are the module's, it is of the module's own, as in torch.distributed.checkpoint.
        """
        found = versions_in(there)
        self._has_versions = isinstance(found, Mapping)
        if isinstance(found, Mapping) and isinstance(self._versions, Mapping):
            self._versions = {
                name: found.get(_canonical(name, self._module), {}) for name in self._versions
            }

    def replace(self, entries: dict[str, Any]) -> None:
        """Let the module's own `load_state_dict` get other entries than the module's memory."""
        self._keys, self.entries, self._loose = self.entries.keys(), entries, True

    def apply(self, strict: bool = True) -> None:
        """Load what is not the module's or the optimizer's own memory.

        Raises:
            LoadMismatchError: a module's own `load_state_dict` refuses it; some may be loaded.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        if (optimizer := self._optimizer) is not None:
            entries = {name: self.entries.get(name, {}) for name in self.parameters}
            state: Any = {"state": entries, "param_groups": self._groups}
            asked: Any = [_UnsteppedOptimizer(optimizer)]
            set_optimizer_state_dict(self._module, asked, state)
            for name in self.parameters.keys() - self.entries.keys():
                del optimizer.state[self.parameters[name]]  # torch wants an entry for each
        elif not is_torchs(self._module.load_state_dict):
            load_state(self._module, self._with_versions(), strict)
        elif self._loose:
            options = StateDictOptions(strict=strict)
            try:
                set_model_state_dict(self._module, self._with_versions(), options=options)
            except ours(RuntimeError) as error:
                if type(error) is not RuntimeError:  # the user's own
                    raise
                raise LoadMismatchError(
                    f"the checkpoint does not fit this {type(self._module).__name__}: {error}"
                ) from error

    def _with_versions(self) -> dict[str, Any]:
        """Return a module's entries as `state_dict()` returns them."""
        state = OrderedDict(self.entries)
        is_known = self._has_versions or self._keys is None or self._keys == state.keys()
        if self._versions is not None and is_known:
            state._metadata = self._versions  # type: ignore[attr-defined]
        return state


def versions_of(module: nn.Module, state: dict[str, Any]) -> OrderedDict[str, Any] | None:
    """Return the versions of a module's parts by canonical names, None if its state has none."""
    found = versions_in(state)
    if not isinstance(found, Mapping):
        return None
    return OrderedDict((_canonical(name, module), one) for name, one in found.items())


# What wrappers put into the names of modules, and torch takes out of those of a state.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def _canonical(name: str, module: nn.Module) -> str:
    """Return the name of a module's part without those of wrappers."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if isinstance(module, nn.parallel.DistributedDataParallel) and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _found_group(own: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's group with the settings that a file has for its parameters.

    Raises:
        ValueError: the file has several settings for them.
    """
    found: dict[str, Any] | None = None
    for group in groups:
        names = set(group.get("params", ())).intersection(own["params"])
        if not names:
            continue
        if found is None:
            found = group
            continue
        for key in found.keys() | group.keys():
            one, other = found.get(key), group.get(key)
            if key == "params" or one is other:
                continue
            # the bytes of a tensor are not read yet
            unread = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
            if unread or one != other:
                value = "a tensor" if unread else repr(other)
                raise ValueError(
                    f"the parameters of one group here have several values of {key!r} in the file "
                    f"(that of {min(names)} is {value}): give them groups of their own"
                )
    return own if found is None else {**found, "params": own["params"]}


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's tensors that have memory."""
    for tensor in chain(module.parameters(), module.buffers()):
        if not is_lazy(tensor):
            yield tensor
