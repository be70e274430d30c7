"""What a job of many ranks costs a single one of them: with the package's own code, no processes.

Ranks are simulated one at a time, each in a child of its own: rank 0, a middle one and the last.
Each is given what the others would have sent to it; nothing is sent, and no tensor has memory.
There are `--tensors` tensors in the file, those of all pipeline stages together. The shapes are
those of a model's layers, each with its optimizer's states.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import sys
import time
import tracemalloc
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastserial.bench.table import check_files
from fastserial.checkpoints.convert import name_of
from fastserial.config import current
from fastserial.console import say
from fastserial.distributed.comm.call import RankCall
from fastserial.distributed.comm.distinct import (
    TextHolders,
    digest_of,
    gather_distinct,
    join_holders,
)
from fastserial.distributed.comm.group import Arrival, RankGroup
from fastserial.distributed.comm.links import framed
from fastserial.distributed.comm.replicas import Copies
from fastserial.distributed.comm.tree import Neighbours, ancestors, neighbours
from fastserial.distributed.layout.file_index import FileTensor
from fastserial.distributed.layout.placement import (
    DimShard,
    Holding,
    Mesh,
    TensorSpec,
    boxes_on,
    views,
)
from fastserial.distributed.load.files import StoredFiles
from fastserial.distributed.load.matching import TensorMatch
from fastserial.distributed.load.read_plan import ReadPlan
from fastserial.distributed.load.reader import Arrays, divided_jobs
from fastserial.distributed.load.wanted import Demands, demands_of, texts_of
from fastserial.distributed.save.partition import FilePlan, Move, Partition
from fastserial.distributed.save.session import SaveDecision, StateSummary, join_summaries
from fastserial.distributed.save.shared_file import FileIdentity
from fastserial.distributed.state.agreement import Compared
from fastserial.distributed.state.merging import Describer, described, merged
from fastserial.errors import FastserialError
from fastserial.formats.stored import Chunk, whole_box
from fastserial.formats.tensors import contiguous_stride
from fastserial.progress import show_line
from fastserial.reports import RankReport

__all__ = ["ROWS", "Case", "Counts", "specs_of"]

_HIDDEN, _INNER, _KEYS = 8192, 28672, 1024  # elements, as in a model of 70 billion parameters
# Of a layer: shape, and which dimension tensor parallelism splits (None: none).
_LAYER: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((_HIDDEN, _HIDDEN), 0),
    ((_KEYS, _HIDDEN), 0),
    ((_KEYS, _HIDDEN), 0),
    ((_HIDDEN, _HIDDEN), 1),
    ((_INNER, _HIDDEN), 0),
    ((_INNER, _HIDDEN), 0),
    ((_HIDDEN, _INNER), 1),
    ((_HIDDEN,), None),
    ((_HIDDEN,), None),
)
_DTYPES = (torch.bfloat16, torch.float32, torch.float32)  # a parameter and its two moments
_ALIGNMENT, _HEADER = 64, 120  # bytes: of records in a file, and between two


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        placement: how it shards its tensors, a key of `PLACEMENTS`.
        ranks: how many there are.
        tensors: in the file.
    """

    placement: str
    ranks: int
    tensors: int


class Counts(NamedTuple):
    """What a rank sends: bytes in all, and the most messages in one step."""

    sent_bytes: int
    messages: int


@dataclass(frozen=True)
class ScalingRow:
    """A row of the result.

    Attributes:
        what: was done, a key of `ROWS`.
        placement, ranks, tensors: see `Case`.
        rank: which did it.
        cpu_seconds: of this rank's process.
        peak_bytes: of memory that Python allocated meanwhile, what was there before left out.
        sent_bytes, messages: see `Counts`.
    """

    what: str
    placement: str
    ranks: int
    tensors: int
    rank: int
    cpu_seconds: float
    peak_bytes: int
    sent_bytes: int
    messages: int


def _fsdp(case: Case) -> Iterator[TensorSpec]:
    """FSDP2: every tensor in rows among all ranks."""
    mesh = Mesh((case.ranks,), (tuple(range(case.ranks)),), (DimShard(0),))
    for shape, _, dtype in _tensors(case.tensors):
        yield TensorSpec(shape, dtype, mesh)


def _hsdp(case: Case) -> Iterator[TensorSpec]:
    """HSDP: rows among up to 128 ranks, and replicas of that."""
    shards = max(2, min(128, case.ranks // 2))
    grid = (case.ranks // shards, shards)
    mesh = Mesh(grid, (tuple(range(grid[0] * shards)),), (DimShard(None), DimShard(0)))
    for shape, _, dtype in _tensors(case.tensors):
        yield TensorSpec(shape, dtype, mesh)


def _parallel(case: Case) -> Iterator[TensorSpec]:
    """FSDP2 over tensor parallelism in pipeline stages, each with tensors of its own."""
    stages = tensor = 8 if case.ranks >= 128 else 2
    each = case.ranks // stages
    grid = (each // tensor, tensor)
    for stage in range(stages):
        members = (tuple(range(stage * each, stage * each + grid[0] * tensor)),)
        meshes = {
            None: Mesh(grid, members, (DimShard(0), DimShard(None))),
            0: Mesh(grid, members, (DimShard(0, tensor), DimShard(0))),
            1: Mesh(grid, members, (DimShard(0), DimShard(1))),
        }
        own = case.tensors * (stage + 1) // stages - case.tensors * stage // stages
        for shape, dim, dtype in _tensors(own):
            yield TensorSpec(shape, dtype, meshes[dim])


def _tensors(count: int) -> Iterator[tuple[tuple[int, ...], int | None, torch.dtype]]:
    """Yield shapes, the dimension that tensor parallelism splits, and dtypes."""
    for number in range(count):
        shape, dim = _LAYER[number // len(_DTYPES) % len(_LAYER)]
        yield shape, dim, _DTYPES[number % len(_DTYPES)]


PLACEMENTS: dict[str, Callable[[Case], Iterator[TensorSpec]]] = {
    "FSDP2": _fsdp,
    "HSDP": _hsdp,
    "FSDP x TP x PP": _parallel,
}


def specs_of(case: Case) -> list[TensorSpec]:
    """Return the tensors of a job as all ranks hold them, in the order of the file."""
    return list(PLACEMENTS[case.placement](case))


def file_plan_of(specs: list[TensorSpec], ranks: int) -> FilePlan:
    """Return a file of tensors as rank 0 would lay it out."""
    records, at = [], 64 * len(specs)  # the pickle comes first
    for number, spec in enumerate(specs):
        at += _HEADER
        at += -at % _ALIGNMENT
        records.append((number, number, at, spec.nbytes))
        at += spec.nbytes
    return FilePlan(at + _HEADER, records, list(range(ranks)))


# -- one function for each kind of row: it makes ready, and returns what is measured ---------------


def plan_of_a_save(case: Case, rank: int) -> Callable[[], Counts]:
    """From rank 0's plan to every move of this rank, as the rounds of a save ask for them."""
    specs = specs_of(case)
    message = pickle.dumps(file_plan_of(specs, case.ranks))

    def work() -> Counts:
        made = Partition(pickle.loads(message), specs, rank, case.ranks)
        for _ in made.own_pieces():
            pass
        sent = most = 0
        for number in made.rounds:
            sends = {to: moves for to, moves in made.round(number).sends.items() if to != rank}
            sent += sum(_nbytes(move, specs) for moves in sends.values() for move in moves)
            most = max(most, len(sends))
        return Counts(sent, most)

    return work


class _Replayed:
    """One rank's end of its connections: it receives what it is given, and counts what it sends."""

    def __init__(self) -> None:
        self.parts: dict[int, list[bytes]] = defaultdict(list)
        self.sent = self.most = self._step = 0

    def give(self, rank: int, value: Any) -> None:
        """Let a rank have sent a message."""
        self.parts[rank] += framed(pickle.dumps(value))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sent += tensors[0].nbytes
        self._step += 1
        self.most = max(self.most, self._step)
        return self

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        tensors[0].copy_(torch.frombuffer(bytearray(self.parts[rank].pop(0)), dtype=torch.uint8))
        self._step = 0
        return self

    def wait(self, timeout: object) -> None:
        pass


def _replayed(case: Case, rank: int) -> tuple[RankGroup, _Replayed, Neighbours]:
    """Return a rank's group that is ready for a call, and what it is fed from."""
    stores: Any = torch.distributed
    comm, fed = RankGroup(tuple(range(case.ranks)), rank, stores.HashStore()), _Replayed()
    comm.links.group = fed
    comm.begin(600, RankCall("a save"))
    around = neighbours(rank, case.ranks)
    return comm, fed, around


def _below(rank: int, around: Neighbours, case: Case) -> dict[int, range]:
    """Return the ranks that each child's messages are of."""
    stop = rank + 1
    while stop < case.ranks and rank in (stop, *ancestors(stop, case.ranks)):
        stop += 1
    return dict(zip(around.children, map(range, around.children, (*around.children[1:], stop)),
                    strict=True))  # fmt: skip


def _feed_distinct(
    fed: _Replayed, around: Neighbours, below: Mapping[int, range], texts: Sequence[Sequence[bytes]]
) -> None:
    """Let the others have sent what `gather_distinct` asks them for, the first time.

    Args:
        texts: of each rank.
    """
    digests = {id(some): [digest_of(text) for text in some] for some in texts}

    def holders(ranks: range) -> TextHolders:
        found = [TextHolders({one: [(rank, rank + 1)] for one in digests[id(texts[rank])]})
                 for rank in ranks]  # fmt: skip
        return join_holders(found)

    whole = holders(range(len(texts)))
    news = {}
    for digest, runs in whole.runs.items():
        if runs != [(0, len(texts))]:
            first = runs[0][0]
            text = texts[first][digests[id(texts[first])].index(digest)]
            news[first, digest] = zlib.compress(text, 1)
    for child, ranks in below.items():
        fed.give(child, holders(ranks))
        fed.give(child, {digest: text for (rank, digest), text in news.items() if rank in ranks})
    if around.parent is not None:
        fed.give(around.parent, (whole.runs, {digest for _, digest in news}))
        fed.give(around.parent, {digest: text for (_, digest), text in news.items()})


def plan_of_a_load(case: Case, rank: int) -> Callable[[], Counts]:
    """From what this rank wants to all that it reads, and the parts in its first windows.

    The bytes are those of control messages, the messages those of bytes in one step.
    """
    specs = specs_of(case)
    tensors = [
        FileTensor(number, spec.dtype, spec.shape, (Chunk(
            whole_box(spec.shape), name_of(spec.dtype), "", offset, 0, 0,
            contiguous_stride(spec.shape)),))
        for number, _, offset, _ in file_plan_of(specs, case.ranks).records
        for spec in (specs[number],)
    ]  # fmt: skip
    memory = torch.empty(len(specs), dtype=torch.uint8)

    def jobs_of(rank: int) -> Iterator[TensorMatch]:
        for number, spec in enumerate(specs):
            if isinstance(spec.held, Mesh) and spec.held.index_of(rank) is not None:
                sizes = [box.sizes for box in boxes_on(spec, rank)] or [(0,)]
                local = memory.as_strided(sizes[0], [0] * len(sizes[0]), number)
                held = Holding(spec, local, views(spec, rank, local))
                yield TensorMatch(tensors[number], held)

    leaves = [((tensor.number,), tensor) for tensor in tensors]
    files = StoredFiles("", current())
    files.names = [""]
    wanted: list[list[bytes]] = [[]] * case.ranks
    held = [spec.held.grids[0] for spec in specs if isinstance(spec.held, Mesh)]
    for members in {id(one): one for one in held}.values():
        texts = texts_of(jobs_of(members[0]), Arrays(leaves, files).number_of)
        for member in members:
            wanted[member] = texts
    comm, fed, around = _replayed(case, rank)
    _feed_distinct(fed, around, _below(rank, around, case), wanted)

    def work() -> Counts:
        arrays = Arrays(leaves, files)
        jobs = divided_jobs(list(jobs_of(rank)), arrays)
        found = gather_distinct(comm, texts_of(jobs.jobs, arrays.number_of))
        plan = ReadPlan(jobs.grids, jobs.targets, Demands(demands_of(found)), rank)
        most = 0
        for group, number in plan.steps():
            if number:
                break
            for _ in plan.receives(group, number):
                pass
            most = max(most, len({to for to, _, _ in plan.sends(group, number)}))
        return Counts(fed.sent, most)

    return work


def control_messages(case: Case, rank: int) -> Callable[[], Counts]:
    """Everything that ranks tell each other in a save, but for bytes of tensors."""
    specs = specs_of(case)
    meshes = list(dict.fromkeys(spec.held for spec in specs if isinstance(spec.held, Mesh)))
    grids = [mesh.grids for mesh in meshes]
    comm, fed, around = _replayed(case, rank)

    def summary(one: int) -> StateSummary:
        found: dict[Compared, Copies] = {"table": Copies(b"1" * 32, (one,))}
        found["rest"] = Copies(b"2" * 32, (one,))
        for kind, mesh in enumerate(meshes):
            if (shard := mesh.shard_of(one, case.ranks)) is not None:
                found[kind, shard] = Copies(b"3" * 16, (one,))
        return StateSummary({f"{one // 8:036}": one}, {}, grids, found)

    def report(one: int) -> RankReport:
        phases = dict.fromkeys(("plan", "wait", "exchange", "write", "sync"), 0.1)
        return RankReport(rank=one, node=f"{one // 8:036}", bytes=10**9, sent_bytes=10**6,
                          received_bytes=10**6, phases=phases)  # fmt: skip

    def decision(found: StateSummary) -> SaveDecision:
        plan = file_plan_of(specs, case.ranks)
        return SaveDecision([], plan, found.ranges, found.grids, identity, None, True)

    identity = FileIdentity("x" * 60, 1, 10**12)
    whole = range(case.ranks)
    for child, ranks in _below(rank, around, case).items():
        fed.give(child, Arrival(RankCall("a save"), []))
        fed.give(child, join_summaries([summary(one) for one in ranks]))
        fed.give(child, None)
        fed.give(child, [pickle.dumps(report(one)) for one in ranks])
    if around.parent is not None:
        fed.give(around.parent, (1, None))
        fed.give(around.parent, decision(join_summaries([summary(one) for one in whole])))
        fed.give(around.parent, None)
        fed.give(around.parent, len(whole))

    def work() -> Counts:
        comm.match_calls()
        comm.reduce_on_root(summary(rank), join_summaries, decision)
        comm.barrier()
        comm.decide_on_root(report(rank), len)
        return Counts(fed.sent, fed.most)

    return work


def union(case: Case, rank: int) -> Callable[[], Counts]:
    """The states of eight pipeline stages as one, in a first save."""
    stages = 8

    def state(stage: int) -> dict[str, torch.Tensor]:
        first, stop = case.tensors * stage // stages, case.tensors * (stage + 1) // stages
        return {f"layers.{key}.weight": torch.empty(1) for key in range(first, stop)}

    texts = [[described(state(stage), Describer(0, {}, set()))[0]] for stage in range(stages)]
    comm, fed, around = _replayed(case, rank)
    every = [texts[one * stages // case.ranks] for one in range(case.ranks)]
    _feed_distinct(fed, around, _below(rank, around, case), every)
    mine = state(rank * stages // case.ranks)

    def work() -> Counts:
        if len(merged(mine, comm)) != case.tensors:
            raise FastserialError("a key is missing")
        return Counts(fed.sent, fed.most)

    return work


def _nbytes(move: Move, specs: list[TensorSpec]) -> int:
    if move.part is None:
        return move.piece.length
    return move.part.numel * specs[move.piece.source].dtype.itemsize


ROWS: dict[str, Callable[[Case, int], Callable[[], Counts]]] = {
    "plan of a save": plan_of_a_save,
    "plan of a load": plan_of_a_load,
    "control messages": control_messages,
    "union": union,
}


def measured(what: str, case: Case, rank: int) -> ScalingRow:
    """Measure one row: the time in one child, the memory in another one, since counting it is slow.

    Raises:
        FastserialError: the child failed.
    """
    seconds, counts = _in_child(_time, what, case, rank)
    peak = _in_child(_peak, what, case, rank)
    return ScalingRow(what, **asdict(case), rank=rank, cpu_seconds=round(seconds, 4),
                      peak_bytes=peak, **counts._asdict())  # fmt: skip


def _time(what: str, case: Case, rank: int) -> tuple[float, Counts]:
    work = ROWS[what](case, rank)
    began = time.process_time()
    counts = work()
    return time.process_time() - began, counts


def _peak(what: str, case: Case, rank: int) -> int:
    work = ROWS[what](case, rank)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    work()
    return tracemalloc.get_traced_memory()[1] - before


def _in_child(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns in a process that has no caches yet."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(False)
    child = context.Process(target=lambda: theirs.send(call(*arguments)))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise FastserialError("the process of a rank failed") from None
    finally:
        child.join()


def main() -> int:
    """Measure what is asked for, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--tensors", type=int, default=20_000, help="(default: 20000)")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="WHAT")
    parser.add_argument("--placement", nargs="+", choices=list(PLACEMENTS), metavar="PLACEMENT",
                        default=list(PLACEMENTS))  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args()
    if options.ranks < 4 or options.tensors < 1:
        parser.error("there must be 4 ranks and one tensor at least")
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    try:
        check_files(options.json)
        for what in options.only:
            for placement in options.placement:
                case = Case(placement, options.ranks, options.tensors)
                for rank in (0, case.ranks // 2, case.ranks - 1):
                    show_line(f"{what}, {placement}, rank {rank}")
                    row = measured(what, case, rank)
                    found.append(asdict(row))
                    say(_in_words(row))
        if options.json is not None:
            options.json.write_text(json.dumps({"rows": found}, indent=1) + "\n", encoding="utf-8")
    except (FastserialError, OSError) as error:
        say(f"error: {error}", err=True)
        return 2
    return 0


def _in_words(row: ScalingRow) -> str:
    return (
        f"{row.what}, {row.placement}, {row.ranks} × {row.tensors}, rank {row.rank}: "
        f"{row.cpu_seconds:.2f} s, {row.peak_bytes / 2**20:.1f} MiB, sends {row.sent_bytes} bytes, "
        f"{row.messages} messages at once"
    )


if __name__ == "__main__":
    sys.exit(main())
