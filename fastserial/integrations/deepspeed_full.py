"""One ordinary torch file for a DeepSpeed engine under ZeRO 1, 2 or 3, written by all ranks.

With the optimizer the file holds a dict:

    module        the state dict: fp32 master weights of what is trained, frozen parameters in the
                  module's dtype, buffers in fp32, as `zero_to_fp32.py` has them
    optimizer     {"state": {name: {...}}, "param_groups": [...]}, by parameters' names, as torch's
                  get_optimizer_state_dict gives it for a whole model
    client_state  yours

Without it, the state dict alone. An engine resumes from `save_checkpoint`, on another number of
ranks through DeepSpeed's universal checkpoints.

What a rank holds under ZeRO 1, 2 and 3 are ranges of flattened parameters: each parameter's fp32
master weights and optimizer states are ranges of flat partitions, one for each parameter group, or
for parts of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.module import PipelineModule

from fastserial import config, distributed
from fastserial.distributed import FlatShard
from fastserial.distributed.comm.call import call_of
from fastserial.distributed.comm.group import collective
from fastserial.distributed.save.session import TIMEOUT, Writers
from fastserial.errors import ConfigError
from fastserial.reports import SaveReport

__all__ = ["save_full", "writers_of"]


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
        optimizer: with the optimizer's state; else the file is the module's state dict alone.
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
    with collective(None, timeout, call_of("save_full", path)):
        shards = EngineShards(engine)
        state = shards.weights(master)
        if optimizer:
            state = {
                "module": state,
                "optimizer": _optimizer_state(shards),
                "client_state": dict(client_state or {}),
            }
    if writers is None:
        writers = writers_of(engine)
    with _options(engine):
        return distributed.save(state, path, writers=writers, timeout=timeout)


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

    def weights(self, master: bool) -> dict[str, Any]:
        """Return the module's state dict, with shards where this rank has only a part.

        Args:
            master: the fp32 master weights of what is trained, and buffers in fp32, as by
                `zero_to_fp32.py`; else the module's own.
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
                shards[id(value)] = self._untrained(value, master)
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
