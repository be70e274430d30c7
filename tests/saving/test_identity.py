"""Files written with fastserial installed are stock's, byte for byte."""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.corpus import CASES, FORMATS, Case, Counting, noise
from support.damage import flip
from support.identity import (
    TARGETS,
    attempt,
    both,
    compare,
    digest,
    fast,
    last_save,
    saver,
    stock,
)

# Blocks so small, and no buffered way out, that even the smallest file takes the direct path.
DIRECT = {"small_file": 0, "direct": True, "durable": False}
OPTION_SETS: dict[str, dict[str, Any]] = {
    "small": {"durable": False},  # filled by torch's own writer, through its own descriptor
    "smallest_blocks": {**DIRECT, "block_size": 4096, "queue_depth": 1, "threads": 1},
    "many_small_blocks": {**DIRECT, "block_size": 4096, "queue_depth": 8, "threads": 4},
    "medium_blocks": {**DIRECT, "block_size": 65536, "queue_depth": 2, "threads": 4},
    "page_cache": {**DIRECT, "direct": False, "block_size": 65536, "queue_depth": 8, "threads": 2},
}
# Few objects that between them reach every branch of a writer.
TELLING = [
    "checkpoint",
    "empty_between_data",
    "none",
    "descriptor_signatures_mixed",
    "straddle_1048576_+1",
    "raise_value_error",
]


def runnable(*names: str) -> list[Any]:
    """Parameters (case, format), with marks for those that cannot run here."""
    found = []
    for one in [CASES[n] for n in names] if names else CASES.values():
        reason = one.missing()
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        for fmt in one.formats:
            found.append(pytest.param(one, fmt, id=f"{one.name}-{fmt}", marks=marks))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is empty again at once: some cases write 40 MB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Loading odd objects warns; what saving warns of is compared in ``identity``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(("case", "fmt"), runnable())
def test_path(case: Case, fmt: str, folder: Path) -> None:
    """By path, in every way of writing; stock reads back the value, and the object is as before."""
    live = case.build()
    readable = fmt not in case.raises and fmt in case.loads
    before = digest(live) if readable else None
    ways = () if case.large else OPTION_SETS.values()
    both(case, fmt, TARGETS["path"], folder, {}, *ways, live=live)
    if readable:
        assert digest(live) == before
        with stock():
            loaded = torch.load(folder / "fast0" / "archive.pt", weights_only=False)
        assert digest(loaded) == before


@pytest.mark.parametrize(("case", "fmt"), runnable())
def test_file_object(case: Case, fmt: str, folder: Path) -> None:
    """Into an open file."""
    both(case, fmt, TARGETS["file"], folder, {} if case.large else OPTION_SETS["medium_blocks"])


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(("case", "fmt"), runnable(*TELLING))
def test_durable(case: Case, fmt: str, durable: bool, folder: Path) -> None:
    """Synced or not, by path and into a file."""
    for name in ("path", "path_over_longer_file", "file"):
        both(case, fmt, TARGETS[name], folder / name, {"durable": durable, "small_file": 0})


# Stock seeks where nothing can be sought.
ODD_TARGETS = {("path_fifo", "empty_between_data", "zip"): RuntimeError}


# The targets that our writer writes; the others differ in their names, or are written by torch.
OURS = ("path", "path_over_longer_file", "file", "file_middle")
FEW = ("checkpoint", "empty_between_data", "raise_value_error")


@pytest.mark.parametrize(
    ("case", "fmt", "target"),
    [
        pytest.param(*one.values, target, id=f"{one.id}-{target}", marks=one.marks)
        for target in TARGETS
        for one in runnable(*(TELLING if target in OURS else FEW))
    ],
)
def test_targets(case: Case, fmt: str, target: str, folder: Path) -> None:
    """Everything that torch.save writes to."""
    sets = {"durable": False}, OPTION_SETS["many_small_blocks"]
    both(case, fmt, TARGETS[target], folder, *sets, odd=ODD_TARGETS.get((target, case.name, fmt)))


TMPFS = Path("/dev/shm")


@pytest.mark.skipif(not os.access(TMPFS, os.W_OK), reason="no tmpfs here")
@pytest.mark.parametrize("name", ["path", "file_middle"])
@pytest.mark.parametrize(("case", "fmt"), runnable("checkpoint"))
def test_tmpfs(case: Case, fmt: str, name: str) -> None:
    """A file system that tells no alignment for direct I/O."""
    sets = [{**OPTION_SETS["medium_blocks"], "direct": direct} for direct in ("auto", True, False)]
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        both(case, fmt, TARGETS[name], Path(folder), *sets)


# Sizes where the container needs its 64-bit fields: one byte before, at, and by offset only.
HUGE = {
    "largest 32-bit": [0xFFFFFFFE, 5, 70],
    "smallest 64-bit": [0xFFFFFFFF, 5, 70],
    "4 GiB": [1 << 32, 5],
    "64-bit offset": [3 << 30, (1 << 30) + 9, 5000, 0, 6],
}


@pytest.mark.skipif(not os.environ.get("FASTSERIAL_TEST_HUGE"), reason="FASTSERIAL_TEST_HUGE=1")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["path", "file"])
@pytest.mark.parametrize(("sizes", "fmt"), [(s, f) for s in HUGE for f in FORMATS])
def test_beyond_4_gib(sizes: str, fmt: str, kind: str, folder: Path) -> None:
    """Twice more than 4 GiB on disk; the memory is mostly untouched zeros."""
    live = []
    for size in HUGE[sizes]:
        live.append(torch.from_numpy(np.zeros(size, np.uint8)))
        live[-1][:: max(1, size // 99)] = 7
        live[-1][-3:] = 1
    paths = []
    for side, context in (("stock", stock()), ("fast", fast())):
        paths.append(folder / side / "archive.pt")
        paths[-1].parent.mkdir()
        with context, contextlib.ExitStack() as stack:
            f = paths[-1] if kind == "path" else stack.enter_context(open(paths[-1], "wb"))
            torch.save(live, f, _use_new_zipfile_serialization=fmt == "zip")
    assert filecmp.cmp(*paths, shallow=False)


@pytest.mark.parametrize("fmt", FORMATS)
def test_pickled_once(fmt: str, folder: Path) -> None:
    """Objects with side effects are reduced as often as by stock."""
    live = CASES["reduce_counts"].build()
    counts = []
    for context in (stock(), fast()):
        with context:
            before = Counting.calls
            torch.save(live, folder / "a.pt", _use_new_zipfile_serialization=fmt == "zip")
            counts.append(Counting.calls - before)
    assert counts == [2, 2]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ["path", "file"])
def test_fast_side_is_fast(kind: str, fmt: str, folder: Path) -> None:
    """The comparisons above compare two different writers."""

    for direct in (True, False):
        with fast(small_file=0, direct=direct, block_size=65536):
            TARGETS[kind](folder, saver(CASES["bytes_5MB"], fmt, noise(5_000_000)))
        report = last_save()
        assert (report.engine, report.fallback, report.direct) == ("threads", None, direct)
        assert report.bytes > 5_000_000


# --- the harness itself -----------------------------------------------------------------------


def _raise(path: Path) -> None:
    raise RuntimeError("planted")


FAULTS: dict[str, Callable[[Path], object]] = {
    "a bit": lambda p: flip(p, p.stat().st_size - 30),
    "a byte too many": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
    "the mode": lambda p: p.chmod(0o600),
    "a file left over": lambda p: p.with_suffix(".tmp").touch(),
    "a warning": lambda p: warnings.warn("planted", stacklevel=1),
    "an error": _raise,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault: str, folder: Path) -> None:
    """Each kind of difference fails the comparison."""
    save = saver(CASES["checkpoint"], "zip", CASES["checkpoint"].build())

    def faulty(f: str) -> None:
        save(f)
        FAULTS[fault](Path(f))

    with stock():
        want = attempt(TARGETS["path"], folder / "a", save, None)
        compare(want, attempt(TARGETS["path"], folder / "b", save, None))
        with pytest.raises(AssertionError):
            compare(want, attempt(TARGETS["path"], folder / "c", faulty, None))


@pytest.mark.parametrize("opened", [False, True])
def test_records_of_zeros_to_be_written_later(tmp_path: Path, opened: bool) -> None:
    """As torch's own tests write them through its private function."""

    def written() -> bytes:
        path = tmp_path / "a.pt"
        with contextlib.ExitStack() as stack:
            target: Any = stack.enter_context(path.open("wb")) if opened else str(path)
            with torch.serialization._open_zipfile_writer(target) as archive:
                archive.write_record("data.pkl", b"abc", 3)
                for number, size in enumerate((10, 0, 100_000)):
                    archive.write_record_metadata(f"data/{number}", size)
        return path.read_bytes()

    with stock():
        wanted = written()
    with fast():
        assert written() == wanted
