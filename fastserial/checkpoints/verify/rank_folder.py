"""Verifying a folder of torch_checkpointing: every file, and whether there are enough of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from math import prod

from fastserial.checkpoints.rank_folder import LOCAL_TENSOR, RANK_FOLDER, RankFolder, ranks_said
from fastserial.checkpoints.verify.report import Findings, Problem, Result, VerifyReport
from fastserial.errors import CheckpointFileError, CorruptCheckpointError, UnreadableCheckpointError
from fastserial.formats.container import ZipContainer
from fastserial.formats.source import DescriptorSource
from fastserial.formats.tensors import TensorEntry
from fastserial.interrupts import Descriptors

__all__ = ["verify_rank_folder"]


def verify_rank_folder(
    path: str, found: RankFolder, check: Callable[[str], VerifyReport], findings: Findings
) -> Result:
    """Check each file, and look whether there are as many as their DTensors need.

    Args:
        path: the folder.
        found: what is in it.
        check: verifies a file.
        findings: where problems and notes go; each names its file.

    Raises:
        OSError: `metadata.pkl` cannot be read.
        PickleLimitError: it takes too long to read.
    """
    result = Result(RANK_FOLDER)
    notes: dict[str, list[str]] = {}
    for name in found.files:
        report = check(os.path.join(path, name))
        result.records += report.records
        result.checked_bytes += report.checked_bytes
        result.unchecked += report.unchecked
        result.nbytes += report.bytes
        for problem in report.problems:
            findings.add(replace(problem, file=name))
        findings.found += report.found - len(report.problems)
        if report.status == "unreadable" and _is_empty(os.path.join(path, name)):
            findings.add(Problem("truncated", "the file is empty", file=name))
            continue
        if report.status == "unreadable":
            result.reason = f"{name}: {report.notes[-1]}"
            continue
        for note in report.notes:
            notes.setdefault(note, []).append(name)
    for note, names in notes.items():
        findings.note(f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {note}")
    for note in found.notes:
        findings.note(note)
    try:
        _check_ranks(path, found, findings)
    except UnreadableCheckpointError as error:
        result.reason = f"{found.metadata}: {error.message}"
    if not findings.found and result.reason is None:
        for item, files in found.items.items():
            _check_shards(path, item, files, findings)
    return result


def _is_empty(path: str) -> bool:
    """Return whether a file was cut to nothing. (Alone, it may be no checkpoint at all.)"""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and not found.st_size


def _check_ranks(path: str, found: RankFolder, findings: Findings) -> None:
    """Compare the files with what `metadata.pkl` says."""
    try:
        said = ranks_said(path, found)
    except CorruptCheckpointError as error:
        findings.add(Problem("pickle", error.message, None, error.offset, file=found.metadata))
        return
    there = {rank for files in found.items.values() for rank in files}
    lacking = [rank for rank in range(min(said or 0, found.ranks + 1)) if rank not in there]
    if said is not None and (lacking or found.ranks != said):
        text = f"it was saved by {said} ranks, and there are files of {len(there)}"
        findings.add(Problem("missing", text, file=found.metadata))


def _check_shards(path: str, item: str, files: dict[int, str], findings: Findings) -> None:
    """Look whether an item's DTensors are in more shards than it has files.

    The first rank has the largest shard, whatever the placements.
    """
    rank = min(files)
    with Descriptors() as opened:
        fd = opened.open(os.path.join(path, files[rank]), os.O_RDONLY | os.O_NONBLOCK)
        try:
            outline = ZipContainer(DescriptorSource(fd)).outline
        except CheckpointFileError:
            return  # it is none of a DTensor
    tensors = {entry.key: entry for entry in outline.tensors}
    for key, entry in tensors.items():
        count = _shards(entry, tensors.get(key + LOCAL_TENSOR))
        if count > len(files):
            text = f"{item} is in {count} shards at least, and has {len(files)} files"
            findings.add(Problem("missing", text, None, None, (f"{item}.{key}",), files[rank]))
            return


def _shards(whole: TensorEntry, local: TensorEntry | None) -> int:
    """Return in how many shards a tensor is, at least."""
    if local is None or len(local.shape) != len(whole.shape) or 0 in local.shape:
        return 0
    return prod(-(-size // part) for size, part in zip(whole.shape, local.shape, strict=True))
