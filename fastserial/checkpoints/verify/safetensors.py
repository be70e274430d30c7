"""Verifying a safetensors file: its header, and the places in it. It has no checksums."""

from __future__ import annotations

from fastserial.checkpoints.verify.report import Findings, Problem
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.safetensors import read_header
from fastserial.formats.source import Source

__all__ = ["verify_safetensors"]

_NO_CHECKSUMS = "safetensors files have no checksums: structure only"


def verify_safetensors(source: Source, findings: Findings) -> int:
    """Check header, shapes, offsets and the size of the file; return its number of tensors.

    Raises:
        OSError: the file cannot be read.
    """
    findings.note(_NO_CHECKSUMS)
    try:
        return len(read_header(source))
    except CorruptCheckpointError as error:
        findings.add(Problem("directory", error.message, error.record, error.offset))
        return 0
