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

What a rank holds under ZeRO 1, 2 and 3 are ranges of flattened parameters: each parameter's fp32
master weights and optimizer states are ranges of flat partitions, one for each parameter group, or
for parts of one.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.module import PipelineModule

from fastserial import config, distributed
from fastserial.distributed import FlatShard
from fastserial.distributed.onefile.saver import TIMEOUT, Writers
from fastserial.distributed.ranks.group import collective
from fastserial.distributed.sharding.file_index import FileTensor, index_of_file
from fastserial.errors import ConfigError, LoadMismatchError
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


# -- what this rank holds ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlatRange:
    """What this rank holds of a tensor: a range of a flat buffer.

    Attributes:
        shape: of the whole tensor.
        start: first element of it that this rank holds.
        length: how many.
        at: where they begin in the buffer.
    """

    shape: tuple[int, ...]
    start: int
    length: int
    at: int

    def of(self, buffer: torch.Tensor) -> FlatShard:
        """Return the range of a buffer, uncopied."""
        part = buffer.detach().view(-1).narrow(0, self.at, self.length)
        return FlatShard(self.shape, buffer.dtype, self.start, self.length, part)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedParameter:
    """A parameter that the optimizer steps.

    Attributes:
        name: of the parameter; the first one, if it has several.
        parameter: the module's.
        group: number of its parameter group.
        partition: this rank's flat fp32 master weights, of which it is a range.
        range: which range of it.
    """

    name: str
    parameter: torch.nn.Parameter
    group: int
    partition: torch.Tensor
    range: FlatRange


class EngineShards:
    """What this rank holds of an engine's module and optimizer.

    Attributes:
        trained: in the order of the parameter groups.
        base: the torch optimizer, whose parameters are the flat partitions.
    """

    def __init__(self, engine: Any) -> None:
        """Find the shards of an engine.

        Raises:
            ConfigError: it keeps its state in an unsupported way; says which.
        """
        _check(engine)
        self._optimizer = engine.optimizer
        self._module: torch.nn.Module = engine.module
        self._stage3 = engine.zero_optimization_stage() == 3
        self.base: torch.optim.Optimizer = self._optimizer.optimizer
        names = {id(value): name for name, value in self._module.named_parameters()}
        find = self._partitioned if self._stage3 else self._flattened
        self.trained = [
            TrainedParameter(names[id(parameter)], parameter, group, partition, held)
            for parameter, group, partition, held in find()
        ]

    def _flattened(self) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor, FlatRange]]:
        """Yield the parameters under ZeRO 1 and 2: each group is one buffer, cut in equal parts."""
        optimizer = self._optimizer
        if hasattr(optimizer, "bf16_groups"):
            groups, flats = optimizer.bf16_groups, optimizer.bf16_groups_flat
            partitions = optimizer.fp32_groups_flat_partition
        else:
            groups, flats = optimizer.bit16_groups, optimizer.bit16_groups_flat
            partitions = optimizer.single_partition_of_fp32_groups
        for number, (group, flat, partition) in enumerate(
            zip(groups, flats, partitions, strict=True)
        ):
            _check_group(optimizer.real_dp_process_group[number])
            size = partition.numel()
            begin = dist.get_rank(group=optimizer.real_dp_process_group[number]) * size
            for parameter in group:
                # Adding up sizes would be wrong: there is padding, and round_robin_gradients.
                if parameter.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                    raise ConfigError(
                        "a parameter is not in ZeRO's flat buffer: call reload_states() if the "
                        "engine's states were offloaded"
                    )
                offset = parameter.storage_offset() - flat.storage_offset()
                first, stop = max(offset, begin), min(offset + parameter.numel(), begin + size)
                held = FlatRange(tuple(parameter.shape), 0, 0, 0)
                if first < stop:
                    held = FlatRange(held.shape, first - offset, stop - first, first - begin)
                yield parameter, number, partition, held

    def _partitioned(self) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor, FlatRange]]:
        """Yield the parameters under ZeRO 3: each is cut in equal parts, the last one padded."""
        optimizer = self._optimizer
        for number, (group, partition) in enumerate(
            zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        ):
            at = 0
            for parameter in group:
                held = _part(parameter, at)
                at += parameter.ds_tensor.ds_numel
                yield parameter, optimizer.sub_group_to_group_id[number], partition, held

    def weights(self, master: bool, in_place: bool) -> dict[str, Any]:
        """Return the module's state dict, with shards where this rank has only a part.

        Args:
            master: the fp32 master weights of what is trained; else the module's own.
            in_place: return the engine's memory only; else convert buffers to fp32 with master
                weights, as by `zero_to_fp32.py`.
        """
        shards: dict[int, Any] = {}
        for one in self.trained:
            if master:
                shards[id(one.parameter)] = one.range.of(one.partition)
            elif not self._stage3:
                own = replace(one.range, at=one.range.start)
                shards[id(one.parameter)] = own.of(one.parameter)
        state: dict[str, Any] = self._module.state_dict(keep_vars=True)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if id(value) not in shards:
                shards[id(value)] = self._untrained(value, master and not in_place)
            state[key] = shards[id(value)]
        return state

    @staticmethod
    def _untrained(value: torch.Tensor, fp32_buffers: bool) -> torch.Tensor | FlatShard:
        if isinstance(value, torch.nn.Parameter):
            divided = getattr(value, "ds_tensor", None)
            return value.detach() if divided is None else _part(value, 0).of(divided)
        convert = fp32_buffers and value.is_floating_point()
        return value.detach().float() if convert else value.detach()

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        found: list[list[str]] = [[] for _ in self.base.param_groups]
        for one in self.trained:
            found[one.group].append(one.name)
        return found

    def update_module(self) -> None:
        """Copy the master weights into the module. Collective."""
        optimizer = self._optimizer
        if not self._stage3:
            optimizer.update_lp_params()
            return
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)

    def relink_states(self) -> None:
        """Let DeepSpeed link the optimizer's states again, which may be new tensors."""
        if not self._stage3:
            self._optimizer._hp_optimizer_states_linked = False
            if all(self.base.state.values()):
                self._optimizer._lazy_init_hp_params_optimizer_state()

    def hold_parameters(self, whole: bool) -> None:
        """Under ZeRO 3, fetch or free the parameters that DeepSpeed keeps whole. Collective."""
        if self._stage3:
            optimizer = self._optimizer
            step: Callable[[], None] = (
                optimizer.checkpoint_event_epilogue
                if whole
                else optimizer.checkpoint_event_prologue
            )
            step()


def _part(parameter: Any, at: int) -> FlatRange:
    """Return the range of a parameter of ZeRO 3 that this rank holds, `at` in a buffer."""
    _check_group(parameter.ds_process_group)
    size = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank(group=parameter.ds_process_group) * size, parameter.ds_numel)
    return FlatRange(tuple(parameter.ds_shape), start, min(size, parameter.ds_numel - start), at)


def _check_group(group: Any) -> None:
    if dist.get_world_size(group=group) != dist.get_world_size():
        raise ConfigError(
            "some parameters are divided among some of the ranks only (experts, MiCS); one file "
            "holds what is divided among all. Use save_checkpoint and DeepSpeed's universal "
            "checkpoints"
        )


def _check(engine: Any) -> None:
    """Raise ConfigError for an unsupported engine."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() not in (1, 2, 3) or optimizer is None:
        text = (
            "without ZeRO (stage 1, 2 or 3) and an optimizer nothing is divided among the ranks; "
            "use save_checkpoint"
        )
    elif isinstance(engine.module, PipelineModule) or engine.mp_world_size > 1:
        text = (
            "under model or pipeline parallelism the ranks have different parameters; use "
            "save_checkpoint"
        )
    elif getattr(optimizer, "swap_optimizer", False) or getattr(
        optimizer, "params_in_nvme_and_cpu", False
    ):
        text = "what is offloaded to NVMe is not in memory; use save_checkpoint"
    else:
        return
    raise ConfigError(f"one file of a DeepSpeed engine: {text}")
