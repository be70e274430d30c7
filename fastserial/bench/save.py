"""`fastserial bench save` and `demo`: one checkpoint, saved by stock torch, fastserial and fio.

Timed is the whole call, in the durable rows with the fsync of file and directory: fastserial's own,
or one added to the others. fio writes a new file of the same size, its final fsync included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastserial.bench import fio
from fastserial.bench.measure import Sample
from fastserial.bench.payload import mixed_state, tensors_of
from fastserial.bench.rotation import DURABLE, GROUPS, Bench, Row
from fastserial.bench.state import check_memory, scratch, settle
from fastserial.bench.table import CHECKED, MEASURED, Result
from fastserial.bench.torch_rows import Format, engine_rows, fast, torch_rows
from fastserial.reports import format_bytes

_HEADROOM = 256 << 20
Others = Callable[[object, Sequence[Format]], tuple[list[Row], dict[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBench(Bench):
    """What to save, and how to measure.

    Attributes:
        formats: torch's containers to save.
        groups: of the rows (`fastserial.bench.rotation`).
        with_engines: also the engines that are not in use.
    """

    formats: tuple[Format, ...] = ("zip", "legacy")
    groups: tuple[str, ...] = GROUPS
    with_engines: bool = True


def run_save(
    bench: SaveBench,
    say: Callable[[str], None] = lambda text: None,
    others: Others | None = None,
    name: str = "save",
    subject: tuple[str, Callable[[], dict[str, Any]]] | None = None,
) -> Result:
    """Run the benchmark.

    Args:
        bench: what to save, and how to measure.
        say: receives a text for each step.
        others: makes more rows of the state and the containers, and says why some are not there.
        name: of the benchmark.
        subject: what is saved instead of mixed sizes: its name, and what makes it.

    Raises:
        BenchError: too little memory or disk, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    with fast(), scratch(bench.folder, 0):  # before minutes are spent on other rows
        pass
    say("making the data")
    mixed = partial(mixed_state, bench.nbytes, bench.tensors, bench.device)
    what, make_state = subject or ("mixed sizes", mixed)
    state = make_state()
    storages = {one.untyped_storage()._cdata: one.nbytes for one in tensors_of(state).values()}
    nbytes = sum(storages.values())
    rows = torch_rows(state, bench.formats, bench.groups)
    missing: dict[str, str] = {}
    for make in ([engine_rows] if bench.with_engines else []) + ([others] if others else []):
        more, absent = make(state, bench.formats)
        rows += more
        missing |= absent
    what += f"{', on the GPU' * bench.gpu}: {len(tensors_of(state)):,} tensors, "
    what += format_bytes(nbytes)
    with scratch(bench.folder, 2 * nbytes + _HEADROOM) as folder:

        def write_once(settings: fio.FioSettings) -> Sample:
            say(f"looking for fio's best: {settings}")
            settle(bench.pause)
            path = folder / "fio"
            try:
                return fio.run_fio(settings, path, nbytes)
            finally:
                path.unlink(missing_ok=True)

        best = bench.best_of_fio(write_once, missing)
        if best is not None:
            run = partial(fio.run_fio, best, nbytes=nbytes)
            rows = [Row(str(best), DURABLE, run), *rows]
        checked = CHECKED if any(row.check for row in rows) else CHECKED[:1]
        return bench.run(name, what, rows, folder, missing, [*MEASURED, *checked], say)


def run_demo(
    folder: Path, nbytes: int, runs: int, say: Callable[[str], None] = lambda text: None
) -> Result:
    """Save a state dict of about `nbytes` bytes both ways; every save includes its fsync.

    Raises:
        BenchError: there is too little memory or disk.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_memory(2 * nbytes)
    bench = SaveBench(
        folder=folder,
        nbytes=nbytes,
        runs=runs,
        groups=(DURABLE,),
        with_engines=False,
        with_fio=False,
    )
    return run_save(bench, say, name="demo")
