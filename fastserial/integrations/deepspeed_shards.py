"""What a rank of a DeepSpeed engine holds under ZeRO 1, 2 and 3: ranges of flattened parameters.

Each parameter's fp32 master weights and optimizer states are ranges of flat partitions, one for
each parameter group, or for parts of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.module import PipelineModule

from fastserial.distributed import FlatShard
from fastserial.errors import ConfigError

__all__ = ["EngineShards", "FlatRange", "TrainedParameter"]


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
