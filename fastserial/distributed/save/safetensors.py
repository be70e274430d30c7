"""A model as Hugging Face's folder of safetensors files, written by all ranks.

Each file is saved as an ordinary one is, by all ranks together, with the layout of safetensors in
place of a zip's; the index comes last and completes the folder. The messages of a save: what each
rank would write, and where; those of `SaveTask` for each file; that the index is there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastserial.checkpoints.convert import type_name
from fastserial.config import current
from fastserial.distributed.comm.call import call_of
from fastserial.distributed.comm.group import RankGroup, collective, path_of
from fastserial.distributed.layout.placement import as_dtensor, local_of
from fastserial.distributed.save.partition import FilePlan
from fastserial.distributed.save.session import SaveTask, Writers
from fastserial.distributed.state.states import state_of_module
from fastserial.distributed.state.tables import StateTable
from fastserial.distributed.state.walk import buffers_of
from fastserial.errors import ConfigError, write_error
from fastserial.files.durable import make_folder, replace_bytes
from fastserial.formats.extents import Extent, Literal, clip
from fastserial.formats.safetensors import (
    INDEX,
    ONE_FILE,
    file_order,
    header_bytes,
    index_bytes,
    is_writable,
    split,
)
from fastserial.interrupts import finish_after, ours, suppress
from fastserial.reports import RankReport, SaveReport, publish_save

if TYPE_CHECKING:
    import torch.distributed as dist


_METADATA = {"format": "pt"}


class _Contents(NamedTuple):
    """What a rank would write.

    Attributes:
        tensors: name of the dtype, shape and bytes of each key, of the whole tensors.
        held: keys of which this rank has elements.
        shared: for a key, the first one with the same memory.
    """

    tensors: dict[str, tuple[str, tuple[int, ...], int]]
    held: set[str]
    shared: dict[str, str]


class _FileLayout:
    """The layout of one file, with what `SaveTask` uses of `full_pickle.FileLayout`.

    Attributes:
        nbytes: of the file.
    """

    rest = ()
    trailer = None

    def __init__(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int]) -> None:
        """Lay out a file.

        Args:
            tensors: as they are as a whole, in the order of the file.
            numbers: of their sources.
        """
        rows = [(key, *_row(tensor)) for key, tensor in tensors.items()]
        self._header = header_bytes(rows, _METADATA)
        self._records: list[tuple[int, int, int, int]] = []
        at = len(self._header)
        for index, (key, _, _, nbytes) in enumerate(rows):
            if nbytes:
                self._records.append((index, numbers[key], at, nbytes))
            at += nbytes
        self.nbytes = at

    def extents_at(self, offset: int, length: int) -> Iterator[Extent]:
        """Return the extents that are the header's bytes in a range of the file."""
        header = Extent(0, len(self._header), Literal(self._header))
        return clip([header], offset, offset + length)

    def file_plan(self, writers: list[int]) -> FilePlan:
        """Return what all ranks have to know of the file."""
        return FilePlan(self.nbytes, self._records, writers, False)


class _FileTask(SaveTask):
    """The save of one file."""

    container = "safetensors"

    def _lay_out(self, table: StateTable, state: Any, values: Sequence[Any]) -> Any:
        numbers = dict(zip(state, table.of_leaves, strict=True))
        return _FileLayout(state, numbers)


def save_folder(
    obj: object,
    folder: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    writers: Writers,
    timeout: float,
    shard_nbytes: int,
) -> SaveReport:
    """Write a model as a folder of safetensors files; see `save`. Collective."""
    began = perf_counter()
    reports: list[SaveReport] = []
    with collective(group, timeout, call_of("distributed.save", folder)) as comm:
        path = path_of(folder, obj, "distributed.save(model, folder)")
        config = current()
        if not isinstance(shard_nbytes, int) or shard_nbytes <= 0:
            raise ConfigError(f"shard_nbytes must be a number of bytes, not {shard_nbytes!r}")
        state = _tensors_of(obj)
        mine = _Contents(
            {key: _row(one) for key, one in state.items()},
            {key for key, one in state.items() if local_of(one, key).numel()},
            _shared(state),
        )
        files = comm.decide_on_root(
            mine, lambda found: _begin(path, comm.jobs, found, shard_nbytes)
        )
        try:
            for name, keys in files.items():
                tensors = {key: state[key] for key in keys}
                reports.append(_save_file(comm, os.path.join(path, name), tensors, writers))
            if len(files) > 1:
                written = [key for keys in files.values() for key in keys]
                nbytes = sum(mine.tensors[key][2] for key in written)
                buffers = buffers_of([obj])
                counted = [state[key].numel() for key in written if not _is_in(state[key], buffers)]
                index = index_bytes(files, nbytes, sum(counted))
                place = os.path.join(path, INDEX)
                comm.decide_on_root(None, lambda _: replace_bytes(place, index, config.durable))
        except BaseException:
            if not comm.rank and not os.path.exists(os.path.join(path, INDEX)):
                for report in reports if len(files) > 1 else ():
                    with suppress(OSError):  # without the index they are no checkpoint
                        os.unlink(report.path)
            raise
    report = replace(
        reports[0],
        path=path,
        bytes=sum(one.bytes for one in reports),
        ranks=_summed([one.ranks for one in reports]),
        seconds=perf_counter() - began,
    )
    publish_save(report, config.on_report, direct=config.direct)
    return report


def _save_file(
    comm: RankGroup, path: str, tensors: Mapping[str, torch.Tensor], writers: Writers
) -> SaveReport:
    order = file_order({key: type_name(tensor) for key, tensor in tensors.items()})
    task = _FileTask(comm, path, writers, None, perf_counter())
    try:
        return task.run({key: _own(tensors[key]) for key in order})
    except BaseException as error:
        finish_after(error, task.give_up)
        raise


def _begin(
    path: str, jobs: Sequence[int], found: Sequence[_Contents], most: int
) -> dict[str, list[str]]:
    """Compare what the ranks have, and make the folder; return the keys of each file.

    Args:
        jobs: the job's ranks of the group.

    Raises:
        ConfigError: the ranks differ.
        WriteError: the folder holds a checkpoint, or cannot be made.
    """
    tensors = found[0].tensors
    for rank, one in zip(jobs, found, strict=True):
        if one.tensors != tensors:
            keys = {row[0] for row in {*one.tensors.items()} ^ {*tensors.items()}}
            raise ConfigError(
                f"rank {rank} and rank {jobs[0]} do not have the same tensors: {sorted(keys)[:5]}. "
                "Pass the same keys, dtypes and shapes on all ranks"
            )
    left_out = {
        key
        for some in found
        for key, first in some.shared.items()
        if all(key not in one.held or one.shared.get(key) == first for one in found)
    }
    files = split({key: row[2] for key, row in tensors.items() if key not in left_out}, most)
    refused = {INDEX, ONE_FILE} if len(files) > 1 else {INDEX}  # which transformers reads first
    make_folder(path, True)
    try:
        there = refused.intersection(os.listdir(path))
    except ours(OSError) as error:
        raise write_error(error.errno or errno.EIO, path, None) from error
    if there:
        text = (
            f"it holds a checkpoint ({min(there)}), of which files cannot be replaced one by "
            "one. Save to a new folder, or remove that one first"
        )
        raise write_error(errno.EEXIST, path, text)
    return files


def _summed(files: Sequence[Sequence[RankReport]]) -> tuple[RankReport, ...]:
    """Return what each rank did for all files."""
    return tuple(
        replace(
            parts[0],
            bytes=sum(one.bytes for one in parts),
            sent_bytes=sum(one.sent_bytes for one in parts),
            received_bytes=sum(one.received_bytes for one in parts),
            phases={name: sum(one.phases[name] for one in parts) for name in parts[0].phases},
        )
        for parts in zip(*files, strict=True)
    )


def _tensors_of(obj: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a module or a dictionary.

    Raises:
        ConfigError: there is anything else.
    """
    state: Any = state_of_module(obj) if isinstance(obj, torch.nn.Module) else obj
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"safetensors holds a dictionary of tensors, not a {type(obj).__name__}: pass a module "
            "or its state dict"
        )
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"entry {key!r} is a {type(value).__name__}; safetensors holds tensors by their "
                "names alone"
            )
        if not is_writable(type_name(value), value.shape):
            what = f"{type_name(value)} of shape {list(value.shape)}"
            raise ConfigError(f"entry {key!r}: safetensors has no {what}")
        found[key] = value.detach()
    return found


def _shared(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the keys whose tensor another one has, too, as tied weights do, with that key."""
    firsts: dict[tuple[Any, ...], str] = {}
    found: dict[str, str] = {}
    for key, tensor in state.items():
        local = local_of(tensor, key)
        if local.numel():
            first = firsts.setdefault((local.data_ptr(), *local.shape, *local.stride()), key)
            if first != key:
                found[key] = first
    return found


def _is_in(tensor: torch.Tensor, buffers: Set[int]) -> bool:
    """Return whether a tensor of a state is in the memory of a module's buffers."""
    return as_dtensor(tensor) is None and tensor.untyped_storage()._cdata in buffers


def _row(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], int]:
    """Return the name of the dtype, shape and bytes of a whole tensor."""
    return type_name(tensor), tuple(tensor.shape), tensor.numel() * tensor.itemsize


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage is its elements in their order: itself, or a copy."""
    if as_dtensor(tensor) is not None:
        return tensor
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    whole = plain.untyped_storage().nbytes() == plain.numel() * plain.itemsize
    return plain if whole else plain.clone()
