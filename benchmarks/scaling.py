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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fastserial.bench.table import check_files
from fastserial.console import say
from fastserial.distributed.load.read_plan import ReadPlan
from fastserial.distributed.load.reader import divided_jobs, grids_of
from fastserial.distributed.load.wanted import Demands, demands_of, texts_of
from fastserial.distributed.plan.matching import TensorMatch
from fastserial.distributed.ranks.distinct import digest_of, gather_distinct
from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.save.partition import FilePlan, Move, Partition
from fastserial.distributed.sharding.file_index import FileTensor
from fastserial.distributed.sharding.pieces import (
    Holding,
    Mesh,
    Split,
    TensorSpec,
    boxes_on,
    views,
)
from fastserial.errors import FastserialError
from fastserial.formats.tensors import contiguous_stride
from fastserial.progress import show_line

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
    mesh = Mesh((case.ranks,), (tuple(range(case.ranks)),), (Split(0),))
    for shape, _, dtype in _tensors(case.tensors):
        yield TensorSpec(shape, dtype, mesh)


def _hsdp(case: Case) -> Iterator[TensorSpec]:
    """HSDP: rows among up to 128 ranks, and replicas of that."""
    shards = max(2, min(128, case.ranks // 2))
    grid = (case.ranks // shards, shards)
    mesh = Mesh(grid, (tuple(range(grid[0] * shards)),), (Split(None), Split(0)))
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
            None: Mesh(grid, members, (Split(0), Split(None))),
            0: Mesh(grid, members, (Split(0, tensor), Split(0))),
            1: Mesh(grid, members, (Split(0), Split(1))),
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


class _Simulated(Traffic):
    """Connections of a rank to others, which say what they are told to."""

    def __init__(self, rank: int, said: Sequence[list[Any]]) -> None:
        """Take what all ranks say, at one `decide` after the other."""
        stores: Any = dist
        super().__init__(tuple(range(len(said[0]))), rank, stores.HashStore())
        self._said = iter(said)
        self.sent = 0

    def decide(self, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """Return rank 0's decision, as the real one."""
        every = next(self._said)
        every[self.rank] = value
        answer = pickle.dumps(decision(every))
        self.sent += len(pickle.dumps(value)) if self.rank else len(answer) * (self.size - 1)
        return pickle.loads(answer)


def plan_of_a_load(case: Case, rank: int) -> Callable[[], Counts]:
    """From what this rank wants to all that it reads, and the parts in its first windows.

    The bytes are those of control messages, the messages those of bytes in one step.
    """
    specs = specs_of(case)
    tensors = [
        FileTensor(number, specs[number].dtype, specs[number].shape,
                   contiguous_stride(specs[number].shape), offset)
        for number, _, offset, _ in file_plan_of(specs, case.ranks).records
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
    said: list[list[Any]] = [[[]] * case.ranks, [{}] * case.ranks]
    held = [spec.held.grids[0] for spec in specs if isinstance(spec.held, Mesh)]
    for members in {id(one): one for one in held}.values():
        texts = texts_of(jobs_of(members[0]), grids_of(leaves))
        digests = [digest_of(text) for text in texts]
        for member in members:
            said[0][member] = digests
        said[1][members[0]] = dict(zip(digests, map(zlib.compress, texts), strict=True))
    traffic = _Simulated(rank, said)

    def work() -> Counts:
        grids = grids_of(leaves)
        jobs = divided_jobs(list(jobs_of(rank)), grids)
        found = gather_distinct(traffic, texts_of(jobs.arrays, grids))
        plan = ReadPlan(grids.values(), jobs.targets, Demands(demands_of(found)), rank)
        most = 0
        for group, number in plan.steps():
            if number:
                break
            for _ in plan.receives(group, number):
                pass
            most = max(most, len({to for to, _, _ in plan.sends(group, number)}))
        return Counts(traffic.sent, most)

    return work


def _nbytes(move: Move, specs: list[TensorSpec]) -> int:
    if move.part is None:
        return move.piece.length
    return move.part.numel * specs[move.piece.source].dtype.itemsize


ROWS: dict[str, Callable[[Case, int], Callable[[], Counts]]] = {
    "plan of a save": plan_of_a_save,
    "plan of a load": plan_of_a_load,
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
