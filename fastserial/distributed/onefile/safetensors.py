"""A model as Hugging Face's folder of safetensors files, written and read by all ranks.

Each file is saved as an ordinary one is, by all ranks together, with the layout of safetensors in
place of a zip's; the index comes last and completes the folder. The messages of a save: what each
rank would write, and where; those of `SaveTask` for each file; that the index is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastserial.checkpoints.convert import type_name
from fastserial.checkpoints.verify.file_list import read_index
from fastserial.config import current
from fastserial.distributed.onefile.loader import HALFWAY, LoadTask
from fastserial.distributed.onefile.saver import SaveTask, Writers
from fastserial.distributed.plan.schedule import FilePlan
from fastserial.distributed.ranks.group import Traffic, collective, path_of
from fastserial.distributed.sharding.pieces import as_dtensor, local_of
from fastserial.distributed.state.states import LiveState, state_of_module
from fastserial.errors import (
    ConfigError,
    DistributedError,
    LoadMismatchError,
    write_error,
)
from fastserial.files.durable import replace_bytes, sync_folders
from fastserial.formats.extents import Extent, Literal, clip
from fastserial.formats.safetensors import (
    INDEX,
    ONE_FILE,
    TYPE_NAMES,
    file_order,
    header_bytes,
    index_bytes,
    read_header,
    split,
)
from fastserial.formats.source import DescriptorSource
from fastserial.interrupts import finish
from fastserial.reports import LoadReport, RankReport, SaveReport, publish_load, publish_save

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

    def bytes_at(self, offset: int, length: int) -> torch.Tensor:
        """Return the header's bytes in a range of the file."""
        return torch.frombuffer(
            bytearray(self._header[offset : offset + length]), dtype=torch.uint8
        )

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

    def _lay_out(self, kept: Any, state: Any, values: Sequence[Any]) -> Any:
        numbers = dict(zip(state, kept.table.of_leaves, strict=True))
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
    with collective(group, timeout) as traffic:
        name = path_of(folder, obj, "distributed.save(model, folder)")
        config = current()
        reports = _Folder(traffic, name, writers, shard_nbytes).save(obj)
    report = replace(
        reports[0],
        path=name,
        bytes=sum(one.bytes for one in reports),
        ranks=_summed([one.ranks for one in reports]),
        seconds=perf_counter() - began,
    )
    publish_save(report, config.on_report)
    return report


class _Folder:
    """The save of a folder on one rank."""

    def __init__(self, traffic: Traffic, path: str, writers: Writers, shard_nbytes: int) -> None:
        if not isinstance(shard_nbytes, int) or shard_nbytes <= 0:
            raise ConfigError(f"shard_nbytes must be a number of bytes, not {shard_nbytes!r}")
        self._traffic, self._path, self._writers = traffic, path, writers
        self._most = shard_nbytes
        self._made: list[str] = []  # files in place

    def save(self, obj: object) -> list[SaveReport]:
        """Write all files; return their reports."""
        state = _tensors_of(obj)
        mine = _Contents(
            {key: _row(one) for key, one in state.items()},
            {key for key, one in state.items() if local_of(one, key).numel()},
            _shared(state),
        )
        files: dict[str, list[str]] = self._traffic.decide(mine, self._begin)
        try:
            reports = [
                self._save_file(name, {key: state[key] for key in keys})
                for name, keys in files.items()
            ]
            if len(files) > 1:
                written = [key for keys in files.values() for key in keys]
                counted = [state[key] for key in written]
                if isinstance(obj, torch.nn.Module):
                    counted = list(obj.parameters())
                nbytes = sum(mine.tensors[key][2] for key in written)
                totals = nbytes, sum(one.numel() for one in counted)
                self._traffic.decide(None, lambda _: self._complete(files, *totals))
        except BaseException:
            if len(files) > 1 and not os.path.exists(os.path.join(self._path, INDEX)):
                for path in self._made:  # without the index they are no checkpoint
                    with contextlib.suppress(OSError):
                        os.unlink(path)
            raise
        return reports

    def _begin(self, found: Sequence[_Contents]) -> dict[str, list[str]]:
        """Compare what the ranks have, and make the folder; return the keys of each file.

        Raises:
            ConfigError: the ranks differ.
            WriteError: the folder holds a checkpoint, or cannot be made.
        """
        tensors = found[0].tensors
        for rank, one in enumerate(found):
            if one.tensors != tensors:
                keys = {row[0] for row in {*one.tensors.items()} ^ {*tensors.items()}}
                raise ConfigError(
                    f"rank {rank} and rank 0 do not have the same tensors: {sorted(keys)[:5]}"
                )
        left_out = {
            key
            for some in found
            for key, first in some.shared.items()
            if all(key not in one.held or one.shared.get(key) == first for one in found)
        }
        files = split(
            {key: row[2] for key, row in tensors.items() if key not in left_out}, self._most
        )
        refused = {INDEX, ONE_FILE} if len(files) > 1 else {INDEX}  # which transformers reads first
        try:
            os.makedirs(self._path, exist_ok=True)
            there = refused.intersection(os.listdir(self._path))
            sync_folders([os.path.abspath(self._path)])
        except OSError as error:
            raise write_error(error.errno or errno.EIO, self._path, None) from error
        if there:
            text = (
                f"it holds a checkpoint ({min(there)}), of which files cannot be replaced one by "
                "one. Save to a new folder, or remove that one first"
            )
            raise write_error(errno.EEXIST, self._path, text)
        return files

    def _save_file(self, name: str, tensors: Mapping[str, torch.Tensor]) -> SaveReport:
        path = os.path.join(self._path, name)
        order = file_order({key: type_name(tensor) for key, tensor in tensors.items()})
        task = _FileTask(self._traffic, path, self._writers, None, perf_counter())
        try:
            report = task.run({key: _own(tensors[key]) for key in order})
        except BaseException:
            task.give_up()
            raise
        if self._traffic.rank == 0:
            self._made.append(path)
        return report

    def _complete(self, files: Mapping[str, Sequence[str]], nbytes: int, parameters: int) -> None:
        index = index_bytes(files, nbytes, parameters)
        replace_bytes(os.path.join(self._path, INDEX), index, current().durable)


# -- loads ---------------------------------------------------------------------------------------


def holds_safetensors(path: object) -> bool:
    """Return whether a path is a folder with a model in safetensors files."""
    if not isinstance(path, str | os.PathLike):
        return False
    return any(os.path.exists(os.path.join(path, name)) for name in (INDEX, ONE_FILE))


def load_folder(
    path: str | os.PathLike[str],
    into: Any,
    group: dist.ProcessGroup | None,
    broadcast: bool,
    strict: bool,
    cast: bool,
    timeout: float,
) -> LoadReport:
    """Fill what the ranks hold from a folder of safetensors files. Collective.

    All files are compared before the first byte is read, and then read one after the other.
    """
    began = perf_counter()
    tasks: list[LoadTask] = []
    reports: list[LoadReport] = []
    filled = False
    try:
        with collective(group, timeout) as traffic:
            config = current()
            folder = os.fspath(path)
            live = LiveState(into, [into], into) if isinstance(into, torch.nn.Module) else None
            state: Any = into if live is None else live.entries
            if not isinstance(state, Mapping):
                raise ConfigError(f"{folder} fills a module, or a dictionary of tensors")
            files: dict[str, list[str]] = traffic.decide(None, lambda _: _files_of(folder))
            there = {key for keys in files.values() for key in keys}
            tied = _shared({k: v for k, v in state.items() if isinstance(v, torch.Tensor)})
            every: list[tuple[set[str], dict[str, str]]] = traffic.decide(
                (set(state), tied), lambda every: every
            )
            for _, shared in every:  # a rank sees none of a tensor of which it has nothing
                tied.update(shared)
            wanted = set().union(*(keys for keys, _ in every))
            lacking = {key for key in wanted - there if tied.get(key) not in there}
            missing = [key for key in state if key in lacking]
            unexpected = sorted(there - wanted)
            refusals = [f"not in the folder: {sorted(lacking)[:5]}"] if lacking else []
            if unexpected:
                refusals.append(f"only in the folder: {unexpected[:5]}")
            refusals = refusals if strict else []
            for name, keys in files.items():
                file = os.path.join(folder, name)
                tasks.append(LoadTask(traffic, file, config, broadcast, False, began))
                held = {key: state[key] for key in keys if key in state}
                refusals.append(tasks[-1].compare(held, cast))
            if not any(refusals):
                filled = True
                for task in tasks:
                    reports.append(task.report(task.fill()))
                    task.close()
                if live is not None:
                    with traffic.together(theirs=True):
                        live.give_back()
        if not filled:
            raise LoadMismatchError(f"{folder}: " + "\n".join(filter(None, refusals)))
    except DistributedError as error:
        if filled:
            error.cause = f"{error.cause}. {HALFWAY}"
        raise
    finally:
        finish(*(task.close for task in tasks))
    report = replace(
        reports[0],
        path=folder,
        bytes=sum(one.bytes for one in reports),
        ranks=_summed([one.ranks for one in reports]),
        direct_bytes=sum(one.direct_bytes for one in reports),
        cached_bytes=sum(one.cached_bytes for one in reports),
        seconds=perf_counter() - began,
        missing_keys=tuple(missing),
        unexpected_keys=tuple(unexpected),
    )
    publish_load(report, config.on_load)
    return report


def _files_of(folder: str) -> dict[str, list[str]]:
    """Return the keys of the tensors in each file of a folder.

    Raises:
        CorruptCheckpointError: the index is damaged, or names a file outside of the folder.
        OSError: it cannot be read.
    """
    index = os.path.join(folder, INDEX)
    if os.path.exists(index):
        return read_index(index)
    with open(os.path.join(folder, ONE_FILE), "rb") as file:
        header = read_header(DescriptorSource(file.fileno()))
    return {ONE_FILE: [entry.key for entry in header.outline.tensors]}


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


# -- tensors -------------------------------------------------------------------------------------


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
        if type_name(value) not in TYPE_NAMES:
            raise ConfigError(f"entry {key!r}: safetensors has no dtype {type_name(value)}")
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
