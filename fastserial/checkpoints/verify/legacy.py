"""Verifying a legacy container: its structure. It has no checksums."""

from __future__ import annotations

from fastserial.checkpoints.verify.report import Findings, Problem
from fastserial.errors import CorruptCheckpointError, TruncatedCheckpointError
from fastserial.formats.legacy.structure import LegacyFile, read_legacy
from fastserial.formats.source import Source
from fastserial.formats.tensors import outline

__all__ = ["verify_legacy"]

_NO_CHECKSUMS = "the legacy format has no checksums: structure only"


def verify_legacy(source: Source, findings: Findings) -> int:
    """Check sections, storage table and sizes of a legacy file; return its number of storages.

    Raises:
        OSError: the file cannot be read.
        PickleLimitError: its pickles are larger than the limits.
    """
    findings.note(_NO_CHECKSUMS)
    try:
        file = read_legacy(source)
        found = outline(file.decoded)
    except CorruptCheckpointError as error:
        kind = "truncated" if isinstance(error, TruncatedCheckpointError) else "storage"
        if error.record is None and kind != "truncated":
            kind = "pickle"
        findings.add(Problem(kind, error.message, error.record, error.offset))
        return 0
    for key, text in found.problems.items():
        findings.add(Problem("pickle", f"tensor {key or '(root)'}: {text}"))
    _check_end(file, findings)
    return len(file.storages)


def _check_end(file: LegacyFile, findings: Findings) -> None:
    if file.end != file.size:
        findings.add(
            Problem(
                "unaccounted",
                f"{file.size - file.end} bytes follow the last storage",
                None,
                file.end,
            )
        )
