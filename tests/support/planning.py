"""What a save of hundreds of ranks plans, without them.

A model of Llama 3.1 405B's make, sharded by FSDP within tensor parallelism within pipeline stages,
with AdamW's state: names, shapes and placements, no bytes. The planner is asked what some of the
ranks would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import process_time

import torch

from fastserial.distributed.onefile.decision import writing_ranks
from fastserial.distributed.onefile.laid_out import AbsentMemory
from fastserial.distributed.onefile.saver import tile_bytes
from fastserial.distributed.plan.schedule import FilePlan, Move, schedule
from fastserial.distributed.sharding.pieces import Flat, Mesh, Split, TensorSpec
from fastserial.formats.extents import Data
from fastserial.formats.zip.layout import ZipLayout
from fastserial.memory.held_settings import paused_collection

__all__ = ["PlanBench", "PlanResult", "RankPlan", "plan_of", "run_planning"]

# Llama 3.1 405B. With another number of tensors the layers are more and smaller, or fewer.
_LAYERS, _HIDDEN, _INNER, _KEYS, _VOCABULARY = 126, 16384, 53248, 1024, 128256
_STEP = 256  # sizes are multiples of it
_PICKLED = 150  # bytes of a tensor in the pickle
_OPTIMIZER = ("master", "exp_avg", "exp_avg_sq")
_PER_LAYER, _OUTSIDE = 9, 3
_COPIES = 2 + len(_OPTIMIZER)  # of a parameter: with its step
_ANYTHING = 1 << 60


@dataclass(frozen=True, slots=True)
class PlanBench:
    """What to plan.

    Attributes:
        ranks: of the job.
        tensors: of the state, about.
        tensor_parallel, stages: by how many ranks a layer, and the layers, are split; FSDP has what
            remains.
        every: how many ranks from one that is looked at to the next.
        writers: how many ranks write; 0 is all of them.
    """

    ranks: int = 512
    tensors: int = 20_000
    tensor_parallel: int = 8
    stages: int = 2
    every: int = 171
    writers: int = 0

    @property
    def shards(self) -> int:
        """Ranks of an FSDP group."""
        return self.ranks // (self.tensor_parallel * self.stages)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a rank plans.

    Attributes:
        rank: it.
        seconds: of processor time until it knows what to do.
        tensors: that it has.
        written: bytes of the file.
        ranges: how many pieces of the file that is.
        sent, received: bytes, to and from other ranks.
        to, of: how many ranks these are.
        rounds: how often they meet.
    """

    rank: int
    seconds: float
    tensors: int
    written: int
    ranges: int
    sent: int
    received: int
    to: int
    of: int
    rounds: int


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What was found.

    Attributes:
        bench: what was planned.
        tensors, nbytes: of the file.
        plans: of some ranks, the first is rank 0.
    """

    bench: PlanBench
    tensors: int
    nbytes: int
    plans: Sequence[RankPlan]


def run_planning(bench: PlanBench) -> PlanResult:
    """Plan for some of the ranks.

    Raises:
        ValueError: the ranks cannot be divided like that.
    """
    plan, specs = plan_of(bench)
    ranks = sorted({*range(0, bench.ranks, bench.every), bench.ranks - 1})
    found = [_planned(bench, plan, specs, rank) for rank in ranks]
    return PlanResult(bench, len(specs), plan.nbytes, found)


def plan_of(bench: PlanBench) -> tuple[FilePlan, list[TensorSpec]]:
    """Return the file of the model, and who holds what of it.

    Raises:
        ValueError: the ranks cannot be divided like that.
    """
    if bench.ranks % (bench.tensor_parallel * bench.stages) or not bench.shards:
        raise ValueError(
            f"{bench.ranks} ranks cannot be divided into {bench.stages} stages of groups of "
            f"{bench.tensor_parallel}; choose a multiple of {bench.tensor_parallel * bench.stages}"
        )
    with paused_collection():
        tensors = list(_tensors(bench))
        layout = ZipLayout("step_1000", 64)
        layout.add_bytes("data.pkl", bytes(_PICKLED * len(tensors)), 0)
        names = [f"data/{index}" for index in range(len(tensors))]
        layout.add_memories(names, [AbsentMemory(spec.nbytes) for spec in tensors])
        found = layout.finish("0" * 20, lambda data: 0)
        places = [
            (extent.offset, extent.length)
            for extent in found.extents
            if isinstance(extent.source, Data)
        ]
        records = [(index + 1, index, *place) for index, place in enumerate(places)]
        writers = writing_ranks(bench.writers or "all", [""] * bench.ranks)
        return FilePlan(found.nbytes, records, writers), tensors


def _tensors(bench: PlanBench) -> Iterator[TensorSpec]:
    """Yield the tensors in the order in which `merge="union"` puts them into the file."""
    wide = bench.tensor_parallel
    held = {
        "rows": (Split(0, wide), Split(0)),  # FSDP over rows that tensor parallelism has split
        "columns": (Split(0), Split(1)),
        "alike": (Split(0), Split(None)),
    }
    grids = [
        tuple(range(stage * bench.shards * wide, (stage + 1) * bench.shards * wide))
        for stage in range(bench.stages)
    ]
    meshes = {
        (stage, kind): Mesh((bench.shards, wide), (grid,), splits)
        for stage, grid in enumerate(grids)
        for kind, splits in held.items()
    }
    counters = [Flat(((grid[0], 0, 4),)) for grid in grids]
    layers = list(_layers(bench))
    for stage, shape, kind in layers:
        yield TensorSpec(shape, torch.bfloat16, meshes[stage, kind])
    for stage, shape, kind in layers:
        yield TensorSpec((4,), torch.uint8, counters[stage])
        for _ in _OPTIMIZER:
            yield TensorSpec(shape, torch.float32, meshes[stage, kind])


def _layers(bench: PlanBench) -> Iterator[tuple[int, tuple[int, ...], str]]:
    """Yield stage, shape and placement of each parameter."""
    layers = max(1, round((bench.tensors / _COPIES - _OUTSIDE) / _PER_LAYER))
    scale = (_LAYERS / layers) ** 0.5
    hidden, inner = (max(_STEP, round(size * scale / _STEP) * _STEP) for size in (_HIDDEN, _INNER))
    yield 0, (_VOCABULARY, hidden), "rows"
    for layer in range(layers):
        stage = layer * bench.stages // layers
        for rows in (hidden, _KEYS, _KEYS):
            yield stage, (rows, hidden), "rows"
        yield stage, (hidden, hidden), "columns"
        for _ in range(2):
            yield stage, (inner, hidden), "rows"
        yield stage, (hidden, inner), "columns"
        for _ in range(2):
            yield stage, (hidden,), "alike"
    yield bench.stages - 1, (hidden,), "alike"
    yield bench.stages - 1, (_VOCABULARY, hidden), "rows"


def _planned(bench: PlanBench, plan: FilePlan, specs: Sequence[TensorSpec], rank: int) -> RankPlan:
    began = process_time()
    made = schedule(plan, specs, rank, bench.ranks, tile_bytes(bench.ranks))
    seconds = process_time() - began
    rounds = len(made.rounds)
    with paused_collection():
        made.tile_bytes = _ANYTHING
        whole = made.round(0)
    pieces = [*made.locals(), *(piece for piece, _ in whole.pieces)]
    sent, received = _moved(whole.sends, specs), _moved(whole.receives, specs)
    sent.pop(rank, None)
    received.pop(rank, None)
    edges = sorted((piece.offset, piece.offset + piece.length) for piece in pieces)
    return RankPlan(
        rank=rank,
        seconds=seconds,
        tensors=sum(spec.is_held_by(rank) for spec in specs),
        written=made.nbytes,
        ranges=sum(one[1] < other[0] for one, other in pairwise([(0, -1), *edges])),
        sent=sum(sent.values()),
        received=sum(received.values()),
        to=len(sent),
        of=len(received),
        rounds=rounds,
    )


def _moved(moves: Mapping[int, list[Move]], specs: Sequence[TensorSpec]) -> dict[int, int]:
    """Return the bytes that go to each rank, or come from it."""
    return {
        other: sum(
            move.piece.length
            if move.overlap is None
            else move.overlap.part.numel * specs[move.piece.source].dtype.itemsize
            for move in some
        )
        for other, some in moves.items()
    }
