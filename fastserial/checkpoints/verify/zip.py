"""Verifying a zip container: every byte of it is checked, in one pass over the file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from fastserial.checkpoints.verify.checksums import FilePart
from fastserial.checkpoints.verify.purpose import check_purpose, is_part, is_whole_pickle
from fastserial.checkpoints.verify.report import Findings, Problem, Result
from fastserial.checkpoints.verify.zip_structure import (
    LONGEST_GAP,
    check_end,
    check_entries,
    check_entries_loosely,
    check_gap,
    expected_id,
    is_plain,
    is_torch_made,
)
from fastserial.checksums import crc32, crc_mismatch
from fastserial.config.performance import INFLATE_CHUNK
from fastserial.errors import (
    CheckpointFileError,
    CorruptCheckpointError,
    PickleLimitError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.formats.source import Source
from fastserial.formats.storages import ITEM_BYTES
from fastserial.formats.tensors import Outline, zip_outline
from fastserial.formats.zip.directory import Directory, RecordEntry, read_directory
from fastserial.formats.zip.layout import ID_RECORD
from fastserial.formats.zip.records import PICKLE
from fastserial.formats.zip.structs import DEFLATED

__all__ = ["verify_zip"]

_HEAD = 8  # bytes of a record that may look like a data descriptor
_LONGEST_TAIL = 128 * 1024


def verify_zip(archive: FilePart, findings: Findings) -> Result:
    """Check every record's CRC-32 and the whole structure of a zip archive.

    Raises:
        TruncatedCheckpointError: the file becomes shorter.
        OSError: the file's directory cannot be read.
    """
    source, result = archive.source, Result("zip")
    try:
        directory = read_directory(source, headers=False)
        torch_made = is_torch_made(source, directory)
        if not torch_made:
            directory = read_directory(source)
    except UnreadableCheckpointError as error:  # it may be whole: that cannot be told
        result.reason = error.message
        return result
    except CorruptCheckpointError as error:
        kind = "truncated" if isinstance(error, TruncatedCheckpointError) else "directory"
        findings.add(Problem(kind, error.message, error.record, error.offset))
        return result
    records = directory.in_file_order()
    result.records = len(records)
    for problem in check_entries(directory) if torch_made else check_entries_loosely(directory):
        findings.add(problem)
    for problem in check_end(directory, _tail(source, directory), torch_made):
        findings.add(problem)
    stored = [record for record in records if record.method != DEFLATED]
    crcs = archive.checksums([(record.data_offset, record.compressed_size) for record in stored])
    problems: list[Problem] = []
    if torch_made:
        problems += _check_gaps(source, directory)
        if directory.end.trailing:
            findings.note(f"{directory.end.trailing} bytes after the end of the archive")
    crc_of = {record.header_offset: crc for record, crc in zip(stored, crcs, strict=True)}
    for record in records:
        if record.method == DEFLATED:
            crc_of[record.header_offset] = _inflated_crc(source, record)
    id_problem = _check_id(source, records) if torch_made else None
    outline = _outline(source, directory, findings)
    damaged: list[Problem] = []
    for record in records:
        damaged += _check_record(record, crc_of[record.header_offset], id_problem is None, result)
    problems += [problem for problem in damaged if problem.kind == "read"]
    problems.sort(key=lambda problem: problem.offset or 0)
    problems += [problem for problem in damaged if problem.kind != "read"]
    for problem in problems:
        findings.add(_with_tensors(problem, outline))
    if id_problem is not None:
        findings.add(id_problem)
    if outline is not None and not any(problem.record == PICKLE for problem in damaged):
        _check_storages(outline, findings)
    _check_names(directory, findings)
    result.reason = check_purpose(source, directory, findings)
    closed = sum(not record.is_readable for record in records)
    if closed:
        findings.note(
            f"{closed} records are encrypted, or compressed in a way unknown: not checked"
        )
    if result.unchecked > closed:
        without = result.unchecked - closed
        findings.note(f"{without} records were saved without checksums: structure only")
    if not torch_made:
        findings.note("not laid out by torch: only the records were checked")
    return result


def _tail(source: Source, directory: Directory) -> bytes:
    """Return what follows the central directory, or the end of it if that is a lot."""
    start = directory.end.directory_offset + directory.end.directory_size
    start = max(start, directory.size - _LONGEST_TAIL)
    return source.read_at(start, directory.size - start)


def _check_gaps(source: Source, directory: Directory) -> Iterator[Problem]:
    """Check the bytes before, between and after the data of records that torch wrote."""
    records = directory.in_file_order()
    pairs = zip((None, *records), (*records, None), strict=True)
    for before, after in pairs:
        start = before.data_end if before is not None else 0
        end = after.data_offset if after is not None else directory.end.directory_offset
        if end - start > LONGEST_GAP:
            yield Problem("unaccounted", f"{end - start} bytes belong to no record", None, start)
            continue
        try:
            data = source.read_at(start, end - start)
        except OSError as error:
            text = f"{end - start} bytes cannot be read: {error.strerror}"
            yield Problem("read", text, None, start)
        else:
            yield from check_gap(before, after, data, start)


def _check_record(
    record: RecordEntry, crc: int | OSError | None, has_id: bool, result: Result
) -> Iterator[Problem]:
    """Compare the CRC-32 of a record; count it.

    Args:
        crc: of its bytes, or why there is none.
        has_id: the serialization id is right, or there is none: it says which have no checksum.
        result: counts.
    """
    if not (record.size or record.compressed_size):
        return
    if not record.is_readable:
        result.unchecked += 1
        return
    if isinstance(crc, OSError):
        text = f"cannot be read: {crc.strerror}"
        yield Problem("read", text, record.name, record.data_offset)
        return
    mismatch = crc_mismatch(crc, record.crc)
    if mismatch is not None and crc is not None and not record.crc and has_id and is_plain(record):
        result.unchecked += 1
        return
    if crc is not None:
        result.checked_bytes += record.size
    if mismatch is not None:
        text = f"its {record.size} bytes are damaged: {mismatch}"
        yield Problem("checksum", text, record.name, record.data_offset)


def _with_tensors(problem: Problem, outline: Outline | None) -> Problem:
    if outline is None or problem.record is None or not problem.record.startswith("data/"):
        return problem
    users = outline.users.get(problem.record.removeprefix("data/"), [])
    return Problem(problem.kind, problem.message, problem.record, problem.offset, tuple(users))


def _check_id(source: Source, records: Sequence[RecordEntry]) -> Problem | None:
    """Compare the serialization id, which torch makes from all CRCs, with the directory's CRCs.

    Args:
        records: in the order of the file.
    """
    record = next((record for record in records if record.name == ID_RECORD), None)
    if record is None or record.size != 40:
        return Problem("id", "there is no serialization id") if record is not None else None
    text = source.read_at(record.data_offset, record.size)
    if text[20:] == expected_id(records, {}).encode():
        return None
    heads = {  # some may begin like a data descriptor, which torch takes for one
        index: source.read_at(one.data_offset, _HEAD)
        for index, one in enumerate(records)
        if one.compressed_size >= _HEAD
    }
    if text[20:] == expected_id(records, heads).encode():
        return None
    return Problem(
        "id",
        "the serialization id does not match the checksums: records were changed after torch "
        "wrote the file",
        ID_RECORD,
        record.data_offset,
    )


def _outline(source: Source, directory: Directory, findings: Findings) -> Outline | None:
    """Return what the pickle says; what it does not say is noted, or a problem."""
    try:
        outline = zip_outline(source, directory)
    except (CheckpointFileError, PickleLimitError) as error:
        record = directory.find(PICKLE)
        if record is not None and not is_whole_pickle(source, record):
            findings.add(
                Problem("pickle", "it is cut short, or damaged", PICKLE, record.data_offset)
            )
        else:
            findings.note(f"the tensors' keys are not known: {error}")
        return None
    if outline is not None and outline.notes:
        findings.note(outline.notes[0])
    return outline


def _check_names(directory: Directory, findings: Findings) -> None:
    """Look for records of one name, as torch compares them: programs take one or another."""
    first: dict[bytes, RecordEntry] = {}
    for record in directory.records:
        other = first.setdefault(record.full_name.lower(), record)
        if (other.size, other.crc) == (record.size, record.crc):
            continue
        if is_part(record) or is_part(other):
            message = "several records bear this name and differ: readers take one or another"
            findings.add(Problem("directory", message, record.name, record.header_offset))
        else:
            findings.note(f"several records bear the name {record.name}")


def _check_storages(outline: Outline, findings: Findings) -> None:
    """Compare the records' sizes with those of the storages that the pickle speaks of."""
    for key, entry in outline.storages.items():
        name, size = f"data/{key}", entry.held
        if entry.record and size >= entry.nbytes:
            if size - entry.nbytes >= ITEM_BYTES[entry.dtype]:  # it grew while it was pickled
                findings.note(f"{name} has {size} bytes, the pickle says {entry.nbytes}")
            continue
        message = "the pickle refers to it, but it is missing"
        if entry.record:
            message = f"has only {size} bytes, the pickle says {entry.nbytes}"
        findings.add(Problem("storage", message, name, None, tuple(outline.users.get(key, ()))))


def _inflated_crc(source: Source, record: RecordEntry) -> int | OSError | None:
    """Return the CRC-32 of a deflated record, None if it is not well-formed."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    crc, size, at = 0, 0, record.data_offset
    pending = b""
    try:
        while size <= record.size and not inflater.eof:
            if not pending:
                pending = source.read_at(at, min(INFLATE_CHUNK, record.data_end - at))
                at += len(pending)
            data = inflater.decompress(pending, INFLATE_CHUNK)
            if not data and not pending:
                return None
            pending = inflater.unconsumed_tail
            crc = crc32(data, crc)
            size += len(data)
    except (zlib.error, CorruptCheckpointError):
        return None
    except OSError as error:
        return error
    return crc if size == record.size and inflater.eof else None
