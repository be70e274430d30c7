"""One ordinary torch file for a DeepSpeed engine under ZeRO 1, 2 or 3, written by all ranks.

With the optimizer the file holds a dict:

    module        the state dict: fp32 master weights of what is trained, frozen parameters in the
                  module's dtype, buffers in fp32, as `zero_to_fp32.py` has them
    optimizer     {"state": {name: {...}}, "param_groups": [...]}, by parameters' names, as torch's
                  get_optimizer_state_dict gives it for a whole model
    lr_scheduler, loss_scaler, global_steps, global_samples, skipped_steps
                  what else the engine needs to continue
    client_state  yours

Without it, the state dict alone.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fastserial import config, distributed
from fastserial.distributed import FlatShard
from fastserial.distributed.onefile.saver import TIMEOUT, Writers
from fastserial.distributed.ranks.group import collective
from fastserial.distributed.sharding.file_index import FileTensor, index_of_file
from fastserial.errors import ConfigError, LoadMismatchError
from fastserial.integrations.deepspeed_shards import EngineShards, TrainedParameter
from fastserial.reports import SaveReport

__all__ = ["load_full", "save_full", "writers_of"]

_SHOWN = 20  # keys in an error

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def save_full(
    engine: Any,
    path: str | os.PathLike[str],
    optimizer: bool = True,
    *,
    master: bool = True,
    client_state: Mapping[str, Any] | None = None,
    writers: Writers | None = None,
    timeout: float = TIMEOUT,
) -> SaveReport:
    """Write one torch file of an engine; no rank holds the complete state. Collective.

    Args:
        engine: what `deepspeed.initialize` returned, under ZeRO 1, 2 or 3.
        path: on a file system that all ranks share.
        optimizer: with the optimizer's state and all that `load_full` needs to continue; else the
            file is the module's state dict alone.
        master: the weights are the fp32 master weights, as `zero_to_fp32.py` gives them; False:
            those of the module, as `save_16bit_model` gives them; only without the optimizer.
        client_state: further values to store.
        writers: as in `distributed.save`; by default what DeepSpeed's section "checkpoint.writer"
            says ("data_parallel": "machine" is one rank of each node), else all ranks.
        timeout: seconds after which a rank that is not heard from counts as lost.

    Returns:
        What `distributed.save` returns.

    Raises:
        ConfigError: one file cannot hold the engine's state; says why.
        DistributedError: any rank failed; the previous file is intact.
    """
    if optimizer and not master:
        raise ValueError("with the optimizer a file holds master weights: leave master=True")
    if client_state and not optimizer:
        raise ValueError("without the optimizer the file is a state dict, without client_state")
    with collective(None, timeout):
        shards = EngineShards(engine)
        state = shards.weights(master, in_place=False)
        if optimizer:
            state = {
                "module": state,
                "optimizer": _optimizer_state(shards),
                **_progress(engine),
                "client_state": dict(client_state or {}),
            }
    if writers is None:
        writers = writers_of(engine)
    with _options(engine):
        return distributed.save(state, path, writers=writers, timeout=timeout)


def load_full(
    engine: Any,
    path: str | os.PathLike[str],
    optimizer: bool = True,
    *,
    strict: bool = True,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Load a file of `save_full` into an engine, on any number of ranks. Collective.

    A state dict alone, from any program, loads as well: then only the weights change.

    Args:
        engine: what `deepspeed.initialize` returned, under ZeRO 1, 2 or 3, not necessarily that
            of the save.
        path: the file; every rank must see it.
        optimizer: False: only the weights.
        strict: the file and the module must have the same keys.
        timeout: seconds after which a rank that is not heard from counts as lost.

    Returns:
        The `client_state` of the save.

    Raises:
        ConfigError: see `save_full`.
        LoadMismatchError: the file does not fit.
        DistributedError: a rank failed. If the engine is partly filled, it says so: load again.
    """
    name = os.fspath(path)

    def read(_: Sequence[bytes]) -> bytes:
        with open(name, "rb") as file:
            return pickle.dumps(index_of_file(file.fileno(), name).value)

    with collective(None, timeout) as ranks:
        shards = EngineShards(engine)
        value = pickle.loads(ranks.consult(b"", read))  # as rank 0 sees the file
        if not isinstance(value, Mapping):
            raise LoadMismatchError(f"{path} holds a {type(value).__name__}, not a state dict")
        loading = _EngineLoad(engine, shards, value, optimizer)
        if strict:
            loading.compare(name)
    shards.hold_parameters(False)
    try:
        with _options(engine), torch.no_grad():
            distributed.load(path, loading.into, strict=False, cast=True, timeout=timeout)
            with collective(None, timeout):
                loading.load_extra_state()
            with collective(None, timeout):
                loading.finish()
    except LoadMismatchError:  # after other errors a rank may have ended
        shards.hold_parameters(True)
        raise
    shards.hold_parameters(True)
    return loading.client_state


def writers_of(engine: Any) -> Writers:
    """Return who writes, from DeepSpeed's configuration of its own writer."""
    section = (engine._config._param_dict.get("checkpoint") or {}).get("writer") or {}
    return "node" if str(section.get("data_parallel")).lower() == "machine" else "all"


def _options(engine: Any) -> Any:
    """Return a context with the options of `enable`."""
    options = getattr(engine.checkpoint_engine, "options", None)
    return config.options(**options) if isinstance(options, dict) else nullcontext()


def _optimizer_state(shards: EngineShards) -> dict[str, Any]:
    """Return the optimizer's state by the names of the parameters."""
    state: dict[str, Any] = {}
    for one in shards.trained:
        own = shards.base.state.get(one.partition)
        if own:
            state[one.name] = {key: _state_of(one, value) for key, value in own.items()}
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": names}
        for group, names in zip(shards.base.param_groups, shards.groups(), strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _state_of(one: TrainedParameter, value: Any) -> Any:
    """Return an entry of a partition's state as that of a parameter.

    Raises:
        ConfigError: it cannot be divided as the parameters are.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == one.partition.numel() and value.dim():
        return one.range.of(value)
    if value.numel() != 1:
        raise ConfigError(
            f"the optimizer keeps a state of shape {tuple(value.shape)}, which is not of the "
            "parameters' size; use save_checkpoint, or optimizer=False"
        )
    # A copy for each parameter: torch's optimizers count steps in place.
    return value.detach().clone()


def _progress(engine: Any) -> dict[str, Any]:
    """Return what else an engine needs to continue."""
    scheduler = engine.lr_scheduler
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scaler": None if scaler is None else _plain(vars(scaler)),
        **{name: getattr(engine, name) for name in _COUNTERS},
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


class _EngineLoad:
    """A load into an engine.

    Attributes:
        into: for `distributed.load`.
    """

    def __init__(
        self, engine: Any, shards: EngineShards, value: Mapping[str, Any], optimizer: bool
    ) -> None:
        """Prepare what is to be filled.

        Args:
            value: what the file holds, with a `FileTensor` for each tensor: the module, the
                optimizer and others, or a module's state dict alone.
            optimizer: fill the optimizer, if the file has one.
        """
        self._engine = engine
        self._shards = shards
        module, states = value.get("module"), value.get("optimizer")
        self._is_full = isinstance(module, Mapping)
        self._keys = set(module if isinstance(module, Mapping) else value)
        self._weights = shards.weights(master=True, in_place=True)
        self._extra_keys = [
            key
            for key, one in self._weights.items()
            if not isinstance(one, torch.Tensor | FlatShard)
        ]
        self._new: dict[torch.Tensor, dict[str, Any]] = {}
        self.into: dict[str, Any] = self._weights
        if self._is_full:
            self.into = {**dict.fromkeys(value), "module": self._weights}
            self.into.pop("optimizer", None)
        self._dtypes: dict[str, dict[str, torch.dtype | None]] | None = None
        if self._is_full and optimizer and isinstance(states, Mapping):
            self._dtypes = _dtypes_of(states["state"])
            self.into["optimizer"] = {"state": self._states(self._dtypes), "param_groups": None}

    def _states(
        self, dtypes_of: Mapping[str, Mapping[str, torch.dtype | None]]
    ) -> dict[str, dict[str, Any]]:
        """Return each parameter's part of the optimizer's state; new where there is none yet."""
        states: dict[str, dict[str, Any]] = {}
        for one in self._shards.trained:
            dtypes = dtypes_of.get(one.name)
            new = self._new.setdefault(one.partition, {})
            if dtypes is None:
                continue
            own = self._shards.base.state.get(one.partition, {})
            for key, dtype in dtypes.items():
                if key not in new:
                    new[key] = _memory_for(own.get(key), one.partition, dtype)
            states[one.name] = {
                key: None if dtype is None else one.range.of(new[key])
                for key, dtype in dtypes.items()
            }
        return states

    def compare(self, path: str) -> None:
        """Compare the keys of the file with the engine's.

        Raises:
            LoadMismatchError: they are not the same.
        """
        mine, stored = set(self._weights), set(self._keys)
        if self._dtypes:
            mine |= {f"optimizer.state.{one.name}" for one in self._shards.trained}
            stored |= {f"optimizer.state.{name}" for name in self._dtypes}
        lines = [f"not in the file: {key}" for key in mine - stored]
        lines += [f"only in the file: {key}" for key in stored - mine]
        if lines:
            shown = "\n\t".join(sorted(lines)[:_SHOWN])
            more = f"\n\t... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise LoadMismatchError(f"{path} does not fit the engine:\n\t{shown}{more}")

    @property
    def client_state(self) -> dict[str, Any]:
        found = self.into.get("client_state") if self._is_full else None
        return found if isinstance(found, dict) else {}

    def load_extra_state(self) -> None:
        """Let the module load its values that are not tensors."""
        if self._extra_keys:
            extra = {key: self._weights[key] for key in self._extra_keys}
            self._engine.module.load_state_dict(extra, strict=False)

    def finish(self) -> None:
        """Update the module's weights, and take the values that were not filled in place."""
        shards = self._shards
        shards.update_module()
        if self._dtypes is None:
            return
        optimizer = self.into["optimizer"]
        for one in shards.trained:
            for key, value in optimizer["state"].get(one.name, {}).items():
                if not isinstance(value, FlatShard):
                    self._set_shared(one, key, value)
        for partition, state in self._new.items():
            shards.base.state[partition] = state
        shards.relink_states()
        groups = {name: group for group in optimizer["param_groups"] for name in group["params"]}
        for group, names in zip(shards.base.param_groups, shards.groups(), strict=True):
            stored = groups.get(names[0], {}) if names else {}
            group.update({key: value for key, value in stored.items() if key != "params"})
        self._restore_progress()

    def _set_shared(self, one: TrainedParameter, key: str, value: Any) -> None:
        """Take a value that the parameters of a partition share, such as a count of steps."""
        known = self._new[one.partition][key]
        if known is not None and bool(known != value):
            raise LoadMismatchError(
                f"optimizer.state.{one.name}.{key} is {value} in the file, that of another "
                f"parameter of its group is {known}; under ZeRO they share one. The engine is "
                "partly filled"
            )
        self._new[one.partition][key] = value

    def _restore_progress(self) -> None:
        engine, into = self._engine, self.into
        if engine.lr_scheduler is not None and into.get("lr_scheduler") is not None:
            engine.lr_scheduler.load_state_dict(into["lr_scheduler"])
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        saved = into.get("loss_scaler")
        if scaler is not None and saved and saved.keys() == _plain(vars(scaler)).keys():
            vars(scaler).update(saved)  # of the same class: fp16 and bf16 have different ones
        for name in _COUNTERS:
            if into.get(name) is not None:
                setattr(engine, name, into[name])


def _dtypes_of(states: Mapping[str, Any]) -> dict[str, dict[str, torch.dtype | None]]:
    """Return the optimizer's state by parameters: the dtype of tensors of the parameter's size."""
    # A parameter of one element does not show whether an entry has its size; others do.
    divided = {
        key
        for state in states.values()
        for key, item in state.items()
        if isinstance(item, FileTensor) and item.shape
    }
    return {
        name: {key: item.dtype if key in divided else None for key, item in state.items()}
        for name, state in states.items()
    }


def _memory_for(
    own: Any, partition: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor | None:
    """Return memory for an optimizer's state of a partition: the existing one, if there is one.

    None for values that are not tensors of the partition's size.
    """
    if dtype is None:
        return None
    if isinstance(own, torch.Tensor) and own.shape == partition.shape:
        return own
    return torch.zeros_like(partition, dtype=dtype, requires_grad=False)
