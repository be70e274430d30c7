"""Verifying a zip container: every byte of it is checked, in one pass over the file."""

from __future__ import annotations

import bisect
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fastserial.checkpoints.verify.ends import (
    check_end,
    check_entries,
    expected_id,
    is_plain,
    is_torch_made,
)
from fastserial.checkpoints.verify.gaps import LONGEST_GAP, check_gap, check_gap_loosely
from fastserial.checkpoints.verify.purpose import check_purpose, is_part, is_whole_pickle
from fastserial.checkpoints.verify.report import Findings, Problem
from fastserial.checksums import crc32, crc32_combine, crc_mismatch
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
from fastserial.formats.zip.structs import DEFLATED, DESCRIPTOR_SIGNATURE

__all__ = ["Feed", "ZipResult", "verify_zip"]

_HEAD = 8
_LONGEST_TAIL = 128 * 1024

# Told how many bytes are wanted: from the first on, as `scan` delivers them.
Feed = Callable[[int, Callable[[int, memoryview], None], Callable[[int, int, OSError], None]], None]


@dataclass(slots=True)
class ZipResult:
    """What came of a zip.

    Attributes:
        records: how many there are.
        checked_bytes: bytes whose CRC-32 was compared, also where it differs.
        unchecked: records without one.
        no_checkpoint: why it is none, if it is none.
        cannot_tell: why it cannot be checked, if it cannot.
    """

    records: int = 0
    checked_bytes: int = 0
    unchecked: int = 0
    no_checkpoint: str | None = None
    cannot_tell: str | None = None


def verify_zip(source: Source, findings: Findings, feed: Feed) -> ZipResult:
    """Check every record's CRC-32 and the whole structure of a zip archive.

    Args:
        feed: gives all bytes of the records, in large pieces.

    Raises:
        OSError: the file's directory cannot be read.
    """
    try:
        directory = read_directory(source, headers=False)
        torch_made = is_torch_made(source, directory)
        if not torch_made:
            directory = read_directory(source)
    except UnreadableCheckpointError as error:  # it may be whole: that cannot be told
        return ZipResult(cannot_tell=error.message)
    except CorruptCheckpointError as error:
        kind = "truncated" if isinstance(error, TruncatedCheckpointError) else "directory"
        findings.add(Problem(kind, error.message, error.record, error.offset))
        return ZipResult()
    if torch_made:
        for problem in check_entries(directory):
            findings.add(problem)
    remarks: list[str] = []
    for problem in check_end(directory, _tail(source, directory), torch_made, remarks.append):
        findings.add(problem)
    check = _Pass(directory, torch_made)
    end = directory.end.directory_offset
    feed(end, check.visit, check.fail)
    result = _conclude(source, directory, check, torch_made, findings)
    for text, count in Counter((*check.remarks, *remarks)).items():
        findings.note(text if count == 1 else f"{text} ({count} times)")
    return result


def _tail(source: Source, directory: Directory) -> bytes:
    """Return what follows the central directory, or the end of it if that is a lot."""
    start = directory.end.directory_offset + directory.end.directory_size
    start = max(start, directory.size - _LONGEST_TAIL)
    return source.read_at(start, directory.size - start)


class _Pass:
    """Takes blocks in any order from several threads: data is checksummed, gaps are kept."""

    def __init__(self, directory: Directory, torch_made: bool) -> None:
        self.records = directory.in_file_order()
        self.torch_made = torch_made
        self.problems: list[Problem] = []
        self.remarks: list[str] = []
        self.crcs: dict[int, int] = {}
        self.heads: dict[int, bytes] = {}
        self.failed: set[int] = set()
        # Pieces alternate: gap 0, record 0, gap 1, record 1, ..., last gap.
        self._bounds = [0]
        for record in self.records:
            self._bounds += (record.data_offset, record.data_end)
        self._bounds.append(directory.end.directory_offset)
        self._lock = threading.Lock()
        self._partial: dict[int, list[tuple[int, int, int | bytes]]] = {}
        self._arrived: dict[int, int] = {}

    def visit(self, offset: int, view: memoryview) -> None:
        end = offset + len(view)
        bounds = self._bounds
        piece = bisect.bisect_right(bounds, offset) - 1
        while piece < len(bounds) - 1 and bounds[piece] < end:
            first, last = max(offset, bounds[piece]), min(end, bounds[piece + 1])
            if first < last:
                self._take(piece, first, view[first - offset : last - offset])
            piece += 1

    def fail(self, offset: int, length: int, error: OSError) -> None:
        end = offset + length
        hit = False
        for index, record in enumerate(self.records):
            if record.header_offset < end and record.data_end > offset:
                hit = True
                self.failed.add(index)
                self.problems.append(
                    Problem("read", f"cannot be read: {error.strerror}", record.name, offset)
                )
        if not hit:
            self.problems.append(
                Problem("read", f"{length} bytes cannot be read: {error.strerror}", None, offset)
            )

    def _take(self, piece: int, offset: int, view: memoryview) -> None:
        start, end = self._bounds[piece], self._bounds[piece + 1]
        if piece % 2:
            if offset == start and len(view) >= _HEAD and view[:4] == DESCRIPTOR_SIGNATURE:
                self.heads[piece // 2] = bytes(view[:_HEAD])
            part: int | bytes = crc32(view)
        else:
            part = bytes(view) if end - start <= LONGEST_GAP else b""
        if len(view) == end - start:
            self._complete(piece, [(offset, len(view), part)])
            return
        with self._lock:
            parts = self._partial.setdefault(piece, [])
            parts.append((offset, len(view), part))
            self._arrived[piece] = self._arrived.get(piece, 0) + len(view)
            if self._arrived[piece] < end - start:
                return
            del self._partial[piece]
        parts.sort(key=lambda entry: entry[0])
        self._complete(piece, parts)

    def _complete(self, piece: int, parts: list[tuple[int, int, int | bytes]]) -> None:
        if piece % 2:
            crc = 0
            for _, length, part in parts:
                crc = crc32_combine(crc, part, length)  # type: ignore[arg-type]
            self.crcs[piece // 2] = crc
            return
        records, after = self.records, piece // 2
        previous = records[after - 1] if after else None
        following = records[after] if after < len(records) else None
        start = self._bounds[piece]
        data = b"".join(part for _, _, part in parts if isinstance(part, bytes))
        length = self._bounds[piece + 1] - start
        if length <= LONGEST_GAP:
            self.problems += (
                check_gap(previous, following, data, start)
                if self.torch_made
                else check_gap_loosely(previous, following, data, start, self.remarks.append)
            )
        elif self.torch_made:
            self.problems.append(
                Problem("unaccounted", f"{length} bytes belong to no record", None, start)
            )
        else:
            self.remarks.append(f"{length} bytes at {start} belong to no record")


def _conclude(
    source: Source, directory: Directory, check: _Pass, torch_made: bool, findings: Findings
) -> ZipResult:
    result = ZipResult(records=len(check.records))
    id_problem = _check_id(source, check) if torch_made else None
    outline = _outline(source, directory, findings)
    structural = sorted(check.problems, key=lambda problem: problem.offset or 0)
    mismatches: list[Problem] = []
    without = 0
    for index, record in enumerate(check.records):
        if index in check.failed or not (record.size or record.compressed_size):
            continue
        if not record.is_readable:
            result.unchecked += 1
            continue
        crc = check.crcs.get(index)
        if record.method == DEFLATED:
            crc = _inflated_crc(source, record)
        mismatch = crc_mismatch(crc, record.crc)
        if mismatch is None:
            result.checked_bytes += record.size
        elif crc is not None and record.crc == 0 and is_plain(record) and id_problem is None:
            result.unchecked += 1  # the id, or a size that torch wrote, says that it had none
            without += 1
        else:
            if crc is not None:
                result.checked_bytes += record.size
            mismatches.append(
                Problem(
                    "checksum",
                    f"its {record.size} bytes are damaged: {mismatch}",
                    record.name,
                    record.data_offset,
                )
            )
    for problem in (*structural, *mismatches):
        findings.add(_with_tensors(problem, outline))
    if id_problem is not None:
        findings.add(id_problem)
    if outline is not None and not any(problem.record == PICKLE for problem in mismatches):
        _check_storages(directory, outline, findings)
    _check_names(directory, findings)
    result.no_checkpoint = check_purpose(source, directory, findings)
    closed = sum(not record.is_readable for record in check.records)
    if closed:
        findings.note(
            f"{closed} records are encrypted, or compressed in a way unknown: not checked"
        )
    if without:
        findings.note(f"{without} records were saved without checksums: structure only")
    if not torch_made:
        findings.note("not laid out by torch: its structure was checked less closely")
    return result


def _with_tensors(problem: Problem, outline: Outline | None) -> Problem:
    if outline is None or problem.record is None or not problem.record.startswith("data/"):
        return problem
    users = outline.users.get(problem.record.removeprefix("data/"), [])
    return Problem(problem.kind, problem.message, problem.record, problem.offset, tuple(users))


def _check_id(source: Source, check: _Pass) -> Problem | None:
    """Compare the serialization id, which torch makes from all CRCs, with the directory's CRCs."""
    record = next((record for record in check.records if record.name == ID_RECORD), None)
    if record is None or record.size != 40:
        return Problem("id", "there is no serialization id") if record is not None else None
    text = source.read_at(record.data_offset, record.size)
    if text[20:] == expected_id(check.records, check.heads).encode():
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


def _check_storages(directory: Directory, outline: Outline, findings: Findings) -> None:
    """Compare the records' sizes with those of the storages that the pickle speaks of."""
    sizes = {record.name: record.size for record in directory.records}
    for key, entry in outline.storages.items():
        name = f"data/{key}"
        size = sizes.get(name)
        if size is not None and size >= entry.nbytes:
            if size - entry.nbytes >= ITEM_BYTES[entry.dtype]:  # it grew while it was pickled
                findings.note(f"{name} has {size} bytes, the pickle says {entry.nbytes}")
            continue
        message = "the pickle refers to it, but it is missing"
        if size is not None:
            message = f"has only {size} bytes, the pickle says {entry.nbytes}"
        findings.add(Problem("storage", message, name, None, tuple(outline.users.get(key, ()))))


def _inflated_crc(source: Source, record: RecordEntry) -> int | None:
    """Return the CRC-32 of a deflated record, None if it is not well-formed."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    crc, size, at = 0, 0, record.data_offset
    pending = b""
    while size <= record.size and not inflater.eof:
        if not pending:
            pending = source.read_at(at, min(INFLATE_CHUNK, record.data_end - at))
            at += len(pending)
        try:
            data = inflater.decompress(pending, INFLATE_CHUNK)
        except zlib.error:
            return None
        if not data and not pending:
            return None
        pending = inflater.unconsumed_tail
        crc = crc32(data, crc)
        size += len(data)
    return crc if size == record.size and inflater.eof else None
