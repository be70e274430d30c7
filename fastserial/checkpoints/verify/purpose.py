"""What a zip archive is for, and whether torch can load it as that: names, folder, pickle."""

from __future__ import annotations

import io
import pickletools
import re
from collections.abc import Iterator

from fastserial.checkpoints.verify.report import Findings, Problem
from fastserial.errors import CheckpointFileError
from fastserial.formats.source import Source
from fastserial.formats.zip.directory import Directory, RecordEntry
from fastserial.formats.zip.records import PICKLE, read_record

__all__ = ["check_purpose", "is_part", "is_whole_pickle"]

_STORAGE = re.compile(r"data/\d+")
_VERSIONS = ("version", ".data/version")
_PACKAGE = frozenset({".data/extern_modules", ".data/python_version"})
_EXPORTED = frozenset({"archive_format", "serialized_exported_program.json"})
_PARTS = frozenset({PICKLE, "byteorder", *_VERSIONS})
_MOST_VERSION = 64
_MOST_PICKLE = 256 * 1024 * 1024


def is_part(record: RecordEntry) -> bool:
    """Whether a record is part of a checkpoint: torch reads it, or may."""
    return record.name in _PARTS or record.name.startswith("data/")


def check_purpose(source: Source, directory: Directory, findings: Findings) -> str | None:
    """Report what keeps torch from loading an archive; return why it is no checkpoint, or None.

    Raises:
        OSError: the file cannot be read.
    """
    records = directory.records
    names = {record.name for record in records}
    # torch takes the folder of all records from the first one
    inside = b"/" in records[0].full_name
    if not inside and any(record.full_name == PICKLE.encode() for record in records):
        message = "its records are in no folder, where torch looks for them"
        findings.add(Problem("directory", message, records[0].full_name.decode("utf-8", "replace")))
    elif PICKLE in names:
        for problem in _checkpoint(source, directory, names):
            findings.add(problem)
    elif names & _PACKAGE:
        findings.note("a torch.package archive: torch.load does not read it, PackageImporter does")
    elif names & _EXPORTED:
        findings.note("an exported program: torch.load does not read it, torch.export.load does")
    elif any(_STORAGE.fullmatch(name) for name in names):
        findings.add(Problem("pickle", "there is no such record: torch cannot load it", PICKLE))
    else:
        what = "an archive" if findings.found else "a whole archive"
        return f"{what}, but no checkpoint of torch: there is no {PICKLE} in it"
    return None


def _checkpoint(source: Source, directory: Directory, names: set[str]) -> Iterator[Problem]:
    folder = directory.archive_name
    for record in directory.records:
        if record.name.startswith("/"):
            message = f"it is not in the folder {folder!r}: torch does not load the archive"
            yield Problem("directory", message, record.name)
        elif is_part(record) and not record.is_readable:
            message = "it is encrypted, or compressed in a way that torch cannot read"
            yield Problem("directory", message, record.name)
    if names.isdisjoint(_VERSIONS):
        message = "there is no such record, without which torch does not load the archive"
        yield Problem("directory", message, _VERSIONS[0])
    for record in directory.records:
        if record.name in _VERSIONS and not _is_number(source, record):
            yield Problem("directory", "it holds no number", record.name, record.data_offset)


def _is_number(source: Source, record: RecordEntry) -> bool:
    try:
        return read_record(source, record, _MOST_VERSION).strip().isdigit()
    except CheckpointFileError:
        return True  # its checksum says what is wrong


def is_whole_pickle(source: Source, record: RecordEntry) -> bool:
    """Whether a record is a pickle to its end, or none that can be judged.

    Of another pickle module's formats, and of what is too large, nothing is said.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        data = read_record(source, record, _MOST_PICKLE)
    except CheckpointFileError:
        return True  # its checksum says what is wrong
    if not data.startswith(b"\x80"):
        return bool(data)
    try:
        for _ in pickletools.genops(io.BytesIO(data)):
            pass
    except (ValueError, OverflowError, EOFError, Warning):  # where warnings are errors
        return False
    return True
