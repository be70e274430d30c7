"""One ordinary torch file of a DeepSpeed engine under ZeRO 1, 2 or 3, from all ranks, and back.

With the optimizer the file holds a dict:

    module        the state dict: fp32 master weights of what is trained, frozen parameters in the
                  module's dtype, buffers in fp32, as `zero_to_fp32.py` has them
    optimizer     {"state": {name: {...}}, "param_groups": [...]}, by parameters' names, as torch's
                  get_optimizer_state_dict gives it for a whole model
    lr_scheduler, loss_scaler, global_steps, global_samples, skipped_steps
                  what else the engine needs to go on
    client_state  yours

Without it, the state dict alone.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist

from fastserial import config, distributed
from fastserial.distributed import FlatShard
from fastserial.distributed.onefile.decision import Writers
from fastserial.distributed.onefile.saver import TIMEOUT
from fastserial.distributed.ranks.group import collective, node_name
from fastserial.distributed.sharding.file_index import FileTensor, index_of_file
from fastserial.errors import ConfigError, LoadMismatchError
from fastserial.integrations.deepspeed_shards import Shards, Trained
from fastserial.reports import SaveReport

__all__ = ["load_full", "save_full", "writers_of"]

_SHOWN = 20  # keys that an error tells

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SOCKETS = 2  # of a machine, as DeepSpeed counts them


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
    """Write one torch file of an engine, from all ranks, none of which holds the whole. Collective.

    Args:
        engine: what `deepspeed.initialize` returned, under ZeRO 1, 2 or 3.
        path: on a file system that all ranks see.
        optimizer: with the optimizer's state and all that is needed to go on (`load_full`); else
            the file is the module's state dict alone.
        master: the weights are the fp32 master weights, as `zero_to_fp32.py` gives them; False:
            those of the module, as `save_16bit_model` gives them; only without the optimizer.
        client_state: values of your own for the file.
        writers: as in `distributed.save`; by default what DeepSpeed's section "checkpoint.writer"
            says ("data_parallel": replica, socket or machine), else all ranks.
        timeout: seconds after which a rank that is not heard from counts as lost.

    Returns:
        What `distributed.save` returns.

    Raises:
        ConfigError: the engine's state is kept in a way that one file cannot hold; says which.
        DistributedError: any rank failed; the previous file is intact.
    """
    if optimizer and not master:
        raise ValueError("with the optimizer a file holds master weights: leave master=True")
    if client_state and not optimizer:
        raise ValueError("without the optimizer the file is a state dict, without client_state")
    with collective(None, timeout):
        shards = Shards(engine)
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

    A state dict alone, from whomever, loads as well: then the weights are all that changes.

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
        DistributedError: a rank failed. If bytes were moving, it says so: load again.
    """
    name = os.fspath(path)

    def read(_: Sequence[bytes]) -> bytes:
        with open(name, "rb") as file:
            return pickle.dumps(_outline(index_of_file(file.fileno(), name).value, name))

    with collective(None, timeout) as ranks:
        shards = Shards(engine)
        outline: _Outline = pickle.loads(ranks.consult(b"", read))  # as rank 0 sees the file
        filling = _Filling(engine, shards, outline, optimizer and outline.states is not None)
        if strict:
            filling.compare(name)
    shards.gathered(False)
    try:
        with _options(engine), torch.no_grad():
            distributed.load(path, filling.into, strict=False, cast=True, timeout=timeout)
            with collective(None, timeout):
                filling.give_extra_state()
            with collective(None, timeout):
                filling.finish()
    except LoadMismatchError:  # of other errors a rank may have died
        shards.gathered(True)
        raise
    shards.gathered(True)
    return filling.client_state


def writers_of(engine: Any) -> Writers:
    """Return who writes, by DeepSpeed's configuration of its own writer. Collective."""
    section = (engine._config._param_dict.get("checkpoint") or {}).get("writer") or {}
    how = str(section.get("data_parallel") or "replica").lower()
    if how == "machine":
        return "node"
    if how == "socket":
        nodes: list[str] = [""] * dist.get_world_size()
        torch.distributed.all_gather_object(nodes, node_name())
        return min(_SOCKETS * len(set(nodes)), len(nodes))
    return "all"


def _options(engine: Any) -> Any:
    """Put in force what `enable` was given."""
    options = getattr(engine.checkpoint_engine, "options", None)
    return config.options(**options) if isinstance(options, dict) else nullcontext()


def _optimizer_state(shards: Shards) -> dict[str, Any]:
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


def _state_of(one: Trained, value: Any) -> Any:
    """Return an entry of a partition's state as that of a parameter.

    Raises:
        ConfigError: it cannot be divided as the parameters are.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == one.partition.numel() and value.dim():
        return one.place.of(value)
    if value.numel() != 1:
        raise ConfigError(
            f"the optimizer keeps a state of shape {tuple(value.shape)}, which is not of the "
            "parameters' size; use save_checkpoint, or optimizer=False"
        )
    # Each parameter gets its own: torch's optimizers count steps in place.
    return value.detach().clone()


def _progress(engine: Any) -> dict[str, Any]:
    """Return what else an engine needs to go on."""
    scheduler = engine.lr_scheduler
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scaler": None if scaler is None else _plain(vars(scaler)),
        **{name: getattr(engine, name) for name in _COUNTERS},
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


@dataclass(frozen=True, slots=True)
class _Outline:
    """What a file holds.

    Attributes:
        full: it has the module beside other things; else it is the module's state dict.
        keys: of the module's state dict.
        states: of each parameter's name, the optimizer's state: a dtype where it is a tensor of
            the parameter's size. None: the file has no optimizer.
        others: keys beside the module and the optimizer.
    """

    full: bool
    keys: list[str]
    states: dict[str, dict[str, torch.dtype | None]] | None
    others: list[str]


def _outline(value: Any, path: str) -> _Outline:
    if not isinstance(value, Mapping):
        raise LoadMismatchError(f"{path} holds a {type(value).__name__}, no state dict")
    module = value.get("module")
    if not isinstance(module, Mapping):
        return _Outline(False, list(value), None, [])
    others = [key for key in value if key not in ("module", "optimizer")]
    optimizer = value.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return _Outline(True, list(module), None, others)
    entries = optimizer["state"]
    # Whether an entry is of the parameter's size a parameter of one element does not tell.
    divided = {
        key
        for state in entries.values()
        for key, item in state.items()
        if isinstance(item, FileTensor) and item.shape
    }
    states = {
        name: {key: item.dtype if key in divided else None for key, item in state.items()}
        for name, state in entries.items()
    }
    return _Outline(True, list(module), states, others)


class _Filling:
    """An engine that is being filled.

    Attributes:
        into: for `distributed.load`.
    """

    def __init__(self, engine: Any, shards: Shards, outline: _Outline, optimizer: bool) -> None:
        self._engine = engine
        self._shards = shards
        self._outline = outline
        self._optimizer = optimizer
        self._weights = shards.weights(master=True, in_place=True)
        self._loose = [
            key
            for key, value in self._weights.items()
            if not isinstance(value, torch.Tensor | FlatShard)
        ]
        self._new: dict[torch.Tensor, dict[str, Any]] = {}
        self.into: dict[str, Any] = self._weights
        if outline.full:
            self.into = {"module": self._weights, **dict.fromkeys(outline.others)}
        if optimizer:
            self.into["optimizer"] = {"state": self._states(), "param_groups": None}

    def _states(self) -> dict[str, dict[str, Any]]:
        """Return each parameter's part of the optimizer's state; new where there is none yet."""
        states: dict[str, dict[str, Any]] = {}
        for one in self._shards.trained:
            kinds = (self._outline.states or {}).get(one.name)
            new = self._new.setdefault(one.partition, {})
            if kinds is None:
                continue
            own = self._shards.base.state.get(one.partition, {})
            for key, dtype in kinds.items():
                if key not in new:
                    new[key] = None if dtype is None else _room(own.get(key), one.partition, dtype)
            states[one.name] = {
                key: None if dtype is None else one.place.of(new[key])
                for key, dtype in kinds.items()
            }
        return states

    def compare(self, path: str) -> None:
        """Compare the keys of the file with the engine's.

        Raises:
            LoadMismatchError: they are not the same.
        """
        mine, outline = dict.fromkeys(self._weights), self._outline
        lines = [f"not in the file: {key}" for key in mine.keys() - set(outline.keys)]
        lines += [f"only in the file: {key}" for key in set(outline.keys) - mine.keys()]
        if self._optimizer and outline.states:
            names = {one.name for one in self._shards.trained}
            theirs = outline.states.keys()
            lines += [f"not in the file: optimizer.state.{name}" for name in names - theirs]
            lines += [f"only in the file: optimizer.state.{name}" for name in theirs - names]
        if lines:
            shown = "\n\t".join(sorted(lines)[:_SHOWN])
            more = f"\n\t... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise LoadMismatchError(f"{path} does not fit the engine:\n\t{shown}{more}")

    @property
    def client_state(self) -> dict[str, Any]:
        found = self.into.get("client_state") if self._outline.full else None
        return found if isinstance(found, dict) else {}

    def give_extra_state(self) -> None:
        """Let the module load what is no tensor."""
        if self._loose:
            extra = {key: self._weights[key] for key in self._loose}
            self._engine.module.load_state_dict(extra, strict=False)

    def finish(self) -> None:
        """Let the module have its weights, and take over what is no memory of the engine's."""
        shards = self._shards
        shards.spread()
        if not self._optimizer:
            return
        optimizer = self.into["optimizer"]
        for one in shards.trained:
            for key, value in optimizer["state"].get(one.name, {}).items():
                if not isinstance(value, FlatShard):
                    self._take(one, key, value)
        for partition, state in self._new.items():
            shards.base.state[partition] = state
        shards.link()
        groups = {name: group for group in optimizer["param_groups"] for name in group["params"]}
        for group, names in zip(shards.base.param_groups, shards.groups(), strict=True):
            theirs = groups.get(names[0], {}) if names else {}
            group.update({key: value for key, value in theirs.items() if key != "params"})
        self._go_on()

    def _take(self, one: Trained, key: str, value: Any) -> None:
        """Take a value that the parameters of a partition share: a count of steps, say."""
        known = self._new[one.partition][key]
        if known is not None and bool(known != value):
            raise LoadMismatchError(
                f"optimizer.state.{one.name}.{key} is {value} in the file, that of another "
                f"parameter of its group is {known}; under ZeRO they have one. What was to be "
                "filled is filled in part"
            )
        self._new[one.partition][key] = value

    def _go_on(self) -> None:
        engine, into = self._engine, self.into
        if engine.lr_scheduler is not None and into.get("lr_scheduler") is not None:
            engine.lr_scheduler.load_state_dict(into["lr_scheduler"])
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        saved = into.get("loss_scaler")
        if scaler is not None and saved and saved.keys() == _plain(vars(scaler)).keys():
            vars(scaler).update(saved)  # of the same kind: fp16 has another one than bf16
        for name in _COUNTERS:
            if into.get(name) is not None:
                setattr(engine, name, into[name])


def _room(own: Any, partition: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for an optimizer's state of a partition: its own, if it has it."""
    if isinstance(own, torch.Tensor) and own.shape == partition.shape:
        return own
    return torch.zeros_like(partition, dtype=dtype, requires_grad=False)
