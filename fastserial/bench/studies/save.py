"""`fastserial bench save`: one checkpoint, stock torch, fastserial and fio in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastserial.bench.measuring.rotation import Plan
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.studies.comparison import Comparison, compare
from fastserial.bench.studies.model import Method
from fastserial.bench.studies.small import SmallCase, small_cases
from fastserial.bench.studies.startup import Startup, measure_startup
from fastserial.bench.subjects.payload import check_memory, mixed_state
from fastserial.bench.subjects.peers import engine_rows, their_rows
from fastserial.bench.subjects.saving import check_torch
from fastserial.bench.subjects.torch_rows import torch_rows
from fastserial.reports import format_bytes

__all__ = ["SaveBench", "SaveResult", "run_save"]

_HEADROOM = 256 << 20


@dataclass(frozen=True, slots=True)
class SaveBench(Method):
    """What to measure, and how.

    Attributes:
        nbytes: size of the state dict, about.
        tensors: how many tensors it has.
        overwriting: also measure saves over an existing file.
        small: also measure many small tensors, one tiny object, and the time to start.
    """

    nbytes: int = 3 << 30
    tensors: int = 300
    overwriting: bool = True
    small: bool = True


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What was measured: the checkpoint, the small cases, the start."""

    bench: SaveBench
    comparison: Comparison
    small: tuple[SmallCase, ...]
    startup: Startup | None

    @property
    def right(self) -> bool:
        """Whether every file that was compared equals stock torch's."""
        lines = [line for case in self.small for line in case.lines]
        return self.comparison.right and all(line.right for line in lines)


def run_save(bench: SaveBench, say: Callable[[str], None] = lambda text: None) -> SaveResult:
    """Run the benchmark; `say` receives a text for each step.

    Raises:
        BenchError: too little memory or disk, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_torch()
    check_memory(bench.nbytes)
    copies = 2 if bench.overwriting else 1
    with scratch(bench.folder, copies * bench.nbytes + _HEADROOM) as folder:
        # in a function of its own: the state's memory is free for what follows
        comparison = _compare(bench, folder, say)
        small = small_cases(folder, bench.formats, bench.runs, say) if bench.small else []
        startup = measure_startup(max(3, bench.runs), say) if bench.small else None
    return SaveResult(bench, comparison, tuple(small), startup)


def _compare(bench: SaveBench, folder: Path, say: Callable[[str], None]) -> Comparison:
    say("making the data")
    state = mixed_state(bench.nbytes, bench.tensors)
    engines, missing = engine_rows(state, bench.formats)
    theirs, problem = their_rows(state, bench.formats)
    if problem is not None:
        missing["DeepSpeed's writer"] = problem
    return compare(
        lambda small_pages: [
            *torch_rows(
                state, bench.formats, overwriting=bench.overwriting, small_pages=small_pages
            ),
            *engines,
            *theirs,
        ],
        f"{bench.tensors} tensors, {format_bytes(bench.nbytes)}",
        bench.nbytes,
        folder,
        Plan(bench.runs, pause=bench.pause),
        with_fio=bench.with_fio,
        missing=missing,
        say=say,
    )
