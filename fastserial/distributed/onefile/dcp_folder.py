"""`distributed.load` of a folder of torch.distributed.checkpoint, whoever saved it.

Rank 0 reads what is in it, all compare that with what they hold, and each reads what it wants. The
messages: what is in the folder; what does not fit; what was read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fastserial.checksums import crc32
from fastserial.config import current
from fastserial.distributed.conversion import FolderSource
from fastserial.distributed.dcp.folder import METADATA
from fastserial.distributed.dcp.planners import FastLoadPlanner
from fastserial.distributed.dcp.storage_reader import REPLACED, FastStorageReader
from fastserial.distributed.onefile.loader import HALFWAY, refusal_of
from fastserial.distributed.plan.matching import Match, file_leaves, path_name, unused
from fastserial.distributed.ranks.group import collective, node_name, path_of
from fastserial.distributed.sharding.file_index import without_bytes
from fastserial.errors import CheckpointReplacedError, DistributedError, LoadMismatchError
from fastserial.reports import LoadReport, RankReport, publish_load


class _FolderContents(NamedTuple):
    """What a folder holds.

    Attributes:
        value: the nest, with a `FileTensor` for each tensor.
        keys: of the tensors, by their offsets.
        version: of the checkpoint: see `_version_of`.
    """

    value: Any
    keys: dict[int, str]
    version: int


class _FolderFit(NamedTuple):
    """What a rank found when it compared."""

    problems: list[str]
    missing: list[str]
    unused: set[int]


def load_dcp_folder(
    path: Any,
    into: Any,
    group: dist.ProcessGroup | None,
    strict: bool,
    cast: bool,
    timeout: float,
) -> LoadReport:
    """Fill what the ranks hold from a folder; see `fastserial.distributed.load`. Collective."""
    began = perf_counter()
    is_filling = False
    try:
        with collective(group, timeout) as traffic:
            config = current()
            name = path_of(path, into, "distributed.load(path, into)")
            contents: _FolderContents = traffic.decide(None, lambda _: _contents_of(name))
            reader = _FolderReader(name, config.verify_on_load, traffic.alive)
            metadata = reader.read_metadata()
            if _version_of(name) != contents.version:
                raise CheckpointReplacedError(errno.ENOENT, REPLACED, name)
            leaves = file_leaves(contents.value)
            match = Match(traffic.rank, traffic.ranks, cast)
            match.compare(into, contents.value)
            found = _FolderFit(match.problems, match.missing, set(unused(leaves, match.used)))
            every: list[_FolderFit] = traffic.decide(found, lambda every: every)
            unexpected = sorted(set.intersection(*(one.unused for one in every)))
            names = [path_name(leaves[number][0]) for number in unexpected]
            missing = [one.missing for one in every]
            refusal = refusal_of(name, [one.problems for one in every], missing, names, strict)
            if not refusal:
                planned, is_filling = perf_counter(), True
                reader.fill(match, contents.keys, metadata)
                phases = {"plan": planned - began, "own": perf_counter() - planned, "share": 0.0}
                line = RankReport(
                    rank=traffic.rank,
                    node=node_name(),
                    bytes=reader.nbytes,
                    sent_bytes=0,
                    received_bytes=0,
                    phases=phases,
                )
                lines: list[RankReport] = traffic.decide(line, lambda every: every)
                with traffic.together(theirs=True):
                    match.finish()
    except DistributedError as error:
        if is_filling:
            error.cause = f"{error.cause}. {HALFWAY}"
        raise
    if refusal:
        raise LoadMismatchError(refusal)
    report = LoadReport(
        path=name,
        container="dcp",
        bytes=sum(one.bytes for one in lines),
        seconds=perf_counter() - began,
        engine=reader.engine,
        verified=reader.is_verified,
        ranks=tuple(lines),
        missing_keys=tuple(match.missing),
        unexpected_keys=tuple(names),
    )
    publish_load(report, config.on_load)
    return report


def _contents_of(path: str) -> _FolderContents:
    """Read what is in a folder, without the bytes of tensors. Executes no pickle."""
    version = _version_of(path)
    source = FolderSource(path)
    try:
        value = _numbered(without_bytes(source.value, source))
        return _FolderContents(value, source.keys, version)
    finally:
        source.close()


def _version_of(path: str) -> int:
    """Return the CRC-32 of `.metadata`: all ranks need the same checkpoint."""
    with open(os.path.join(path, METADATA), "rb") as file:
        return crc32(file.read())


def _numbered(value: Any) -> Any:
    """Return a nest in which optimizers' states are numbered by integers: in folders it is text."""
    if not isinstance(value, dict):
        return value
    found = {key: _numbered(one) for key, one in value.items()}
    if {"state", "param_groups"} <= found.keys() and isinstance(found["state"], dict):
        found["state"] = {
            int(key) if key.isdecimal() else key: one for key, one in found["state"].items()
        }
    return found


class _FolderReader(FastStorageReader):
    """Reads what a rank wants.

    Attributes:
        nbytes: that were read.
        engine: that read them.
        is_verified: whether all of them were compared with checksums.
    """

    def __init__(self, path: str, verify: bool, between: Callable[[], None]) -> None:
        super().__init__(path, verify=verify)
        self.between = between
        self.nbytes, self.engine, self.is_verified = 0, "buffered", verify

    def fill(self, match: Match, keys: dict[int, str], metadata: Metadata) -> None:
        """Read the tensors that a rank wants, given the key of each by its offset."""
        self.set_up_storage_reader(metadata, False)
        planner = FastLoadPlanner()
        items: list[ReadItem] = []
        for tensor, held in match.jobs:
            key = keys.get(tensor.offset, "")
            for box, view in held.parts if key else ():
                index = MetadataIndex(key, torch.Size(box.offsets))
                planner.views[index] = view
                entry: Any = metadata.state_dict_metadata[key]
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                items += create_read_items_for_chunk_list(key, entry, [chunk])
        self.read_data(LoadPlan(items), planner).wait()

    def report(self, **found: Any) -> None:
        counts = found.pop("counts")
        self.nbytes += counts.direct + counts.cached
        self.engine = found["engine"]
        self.is_verified = self.is_verified and found["verified"]
