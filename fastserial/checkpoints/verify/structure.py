"""Verifying files without checksums: legacy and safetensors, by their structure."""

from __future__ import annotations

from fastserial.checkpoints.verify.report import Findings, Problem
from fastserial.errors import CorruptCheckpointError, TruncatedCheckpointError
from fastserial.formats.container import LegacyContainer, SafetensorsContainer
from fastserial.formats.source import Source

__all__ = ["verify_legacy", "verify_safetensors"]


def verify_legacy(source: Source, findings: Findings) -> int:
    """Check sections, storage table and sizes of a legacy file; return its number of storages.

    Raises:
        UnreadableCheckpointError: its pickles have opcodes that are not read.
        PickleLimitError: they are larger than the limits.
        OSError: the file cannot be read.
    """
    findings.note("the legacy format has no checksums: structure only")
    try:
        container = LegacyContainer(source)
        found = container.outline
    except CorruptCheckpointError as error:
        kind = "truncated" if isinstance(error, TruncatedCheckpointError) else "storage"
        if error.record is None and kind != "truncated":
            kind = "pickle"
        findings.add(Problem(kind, error.message, error.record, error.offset))
        return 0
    for key, text in found.problems.items():
        findings.add(Problem("pickle", f"tensor {key or '(root)'}: {text}"))
    end = container.file.end
    if end != source.size:
        text = f"{source.size - end} bytes follow the last storage"
        findings.add(Problem("unaccounted", text, None, end))
    return len(found.storages)


def verify_safetensors(source: Source, findings: Findings) -> int:
    """Check header, shapes, offsets and the size of the file; return its number of tensors.

    Raises:
        OSError: the file cannot be read.
    """
    findings.note("safetensors files have no checksums: structure only")
    try:
        return len(SafetensorsContainer(source).outline.storages)
    except CorruptCheckpointError as error:
        findings.add(Problem("directory", error.message, error.record, error.offset))
        return 0
