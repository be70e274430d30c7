"""Verifying a zip container: every byte of it is checked, in one pass over the file."""

from __future__ import annotations

import io
import pickletools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fastserial.checkpoints.verify.report import Problem, VerifyReport
from fastserial.checksums import CrcLedger, crc32, crc_mismatch
from fastserial.config import Config
from fastserial.config.performance import STREAM_CHUNK
from fastserial.errors import (
    CheckpointFileError,
    CorruptCheckpointError,
    PickleLimitError,
    RemoteError,
    TransferAbandonedError,
    TruncatedCheckpointError,
)
from fastserial.files.remote import ReadAhead, RemoteSource
from fastserial.formats import zip_format, zip_layout
from fastserial.formats.outline import Outline, zip_outline
from fastserial.formats.source import BytesSource, DescriptorSource, Source
from fastserial.formats.tensors import ITEM_BYTES
from fastserial.formats.zip_format import (
    DEFLATED,
    FIELD,
    LOCAL,
    PICKLE,
    U16,
    U32,
    UTF8,
    Directory,
    LocalHeader,
    RecordEntry,
    ambiguous_parts,
    inflated,
    is_part,
    parse_local_header,
    read_directory,
    read_record,
)
from fastserial.interrupts import ours, suppress
from fastserial.loading.reader import CheckedSink, FastFileReader, ReadExtent

Span = tuple[int, int]  # the first byte, and how many


class FilePart:
    """All bytes of an open file, or some: one checkpoint.

    Attributes:
        source: the bytes.
        ordered: the same, for reads in the order of the file.
    """

    def __init__(
        self, fd: int, name: str, config: Config, start: int = 0, size: int | None = None
    ) -> None:
        """Take `size` bytes from byte `start` on; what is no larger than a block is read at once.

        Args:
            fd: the file's descriptor, which its owner closes.
            name: its path, for errors.
            config: block size, queue depth and threads.

        Raises:
            TruncatedCheckpointError: the file ends before.
        """
        self._fd, self._name, self._start = fd, name, start
        # any file can be verified, whatever engine is configured for saves
        self._config = replace(config, engine="threads", cache="drop", small_file=0)
        self.source: Source = DescriptorSource(fd, start, size)
        self._is_small = self.source.size <= config.block_size
        if self._is_small:
            with suppress(OSError):  # then it is read record by record
                self.source = BytesSource(self.source.read_at(0, self.source.size))
        self.ordered = self.source

    def checksums(self, spans: Sequence[Span]) -> list[int | OSError | None]:
        """Return the CRC-32 of each span, an error if it cannot be read, None if it is cut short.

        Args:
            spans: in the order of the file, without overlaps.
        """
        if self._is_small:
            return [_crc_alone(self.source, *span) for span in spans]
        ledger = CrcLedger([nbytes for _, nbytes in spans], [None] * len(spans))
        extents = [
            ReadExtent(self._start + start, nbytes, CheckedSink(None, ledger, index))
            for index, (start, nbytes) in enumerate(spans)
        ]
        try:
            with FastFileReader(self._fd, self._config, self._name) as reader:
                reader.read_into(extents)
        except ours(CorruptCheckpointError):  # it became shorter
            ledger.fail()
        except ours(OSError):
            return [_crc_alone(self.source, *span) for span in spans]
        return [_crc_of(ledger, index) if nbytes else 0 for index, (_, nbytes) in enumerate(spans)]


class RemotePart:
    """A file at a URL, as `FilePart`; close it.

    Its directory is read in small ranges, and all of it once, in its order, with a read-ahead.
    """

    def __init__(self, remote: RemoteSource) -> None:
        self.source: Source = remote
        self.ordered: _Ahead = _Ahead(remote)

    def checksums(self, spans: Sequence[Span]) -> Iterator[int | OSError | None]:
        """Yield the CRC-32 of each span, as `FilePart.checksums`, read when it is asked for."""
        return (_crc_alone(self.ordered, *span) for span in spans)

    def close(self) -> None:
        """Stop reading ahead."""
        self.ordered.close()


class _Ahead:
    """A remote file that is read ahead, as a `Source`."""

    def __init__(self, remote: RemoteSource) -> None:
        self.size = remote.size
        self._file = io.BufferedReader(ReadAhead(remote))

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset` on; errors as of `RemoteSource`."""
        if offset < 0 or offset + nbytes > self.size:
            raise TruncatedCheckpointError(f"the file ends at byte {self.size}: truncated")
        self._file.seek(offset)
        return self._file.read(nbytes)

    def close(self) -> None:
        self._file.close()


def _crc_alone(source: Source, start: int, nbytes: int) -> int | OSError | None:
    """Return the CRC-32 of a span, which the calling thread reads; errors as `_crc_or_error`."""

    def read() -> int:
        crc = 0
        for at in range(start, start + nbytes, STREAM_CHUNK):
            length = min(STREAM_CHUNK, start + nbytes - at)
            crc = crc32(source.read_at(at, length), crc)
        return crc

    return _crc_or_error(read)


def _crc_or_error(read: Callable[[], int]) -> int | OSError | None:
    """Return what `read` returns, or its error, as `FilePart.checksums`: None if it is damage.

    Raises:
        RemoteError: a remote store fails, which is no damage.
    """
    try:
        return read()
    except ours(CorruptCheckpointError):
        return None
    except RemoteError:
        raise
    except ours(OSError) as error:
        return error


def _crc_of(ledger: CrcLedger, index: int) -> int | None:
    try:
        return ledger.wait(index)
    except ours(TransferAbandonedError):
        return None


_PLAIN = (0, 0, 0, 0, 0, 0, 0)
_IS_FOLDER = 0x10  # in the external attributes
_DEFLATED = (0, 20, 0, 0, 0, 0, 0)  # the code in a TorchScript archive
# A descriptor, a header, a name and an extra field of the greatest lengths.
_LONGEST_GAP = zip_format.DESCRIPTOR64.size + LOCAL.size + 2 * U16
_STORAGE = re.compile(r"data/\d+")
_VERSIONS = ("version", ".data/version")
_MOST_VERSION = 64
_MOST_PICKLE = 4 * 1024 * 1024  # of one that is compressed
# So many bytes of a file are inflated, and so many more for each of its own: deflate makes up to
# 1032 bytes of one, so that a file of a few megabytes would take minutes.
_INFLATED, _INFLATED_OF_ONE = 1 << 30, 256
_CLOSED = "encrypted, or compressed with an unknown method"
_DENSE = "compressed so much that it would take too long to inflate them"


def verify_zip(archive: FilePart | RemotePart, report: VerifyReport) -> None:
    """Check every record's CRC-32 and the whole structure of a zip archive.

    Raises:
        CorruptCheckpointError: its directory is damaged, or it becomes shorter.
        UnreadableCheckpointError: its directory cannot be read, so it may be whole.
        OSError: the file's directory cannot be read.
    """
    source, report.format = archive.source, "zip"
    directory = read_directory(source, headers=False)
    torch_made = _is_torch_made(source, directory)
    if not torch_made and not all(any(record.stamp) for record in directory.records):
        directory = read_directory(source)  # else all local headers were read
    records = directory.in_file_order()
    report.records = len(records)
    outline = _outline(source, directory, report)
    problems = list(_check_ends(source, directory, torch_made))
    as_stored = [record for record in records if record.is_stored]
    crcs = iter(
        archive.checksums([(record.data_offset, record.compressed_size) for record in as_stored])
    )
    unread: Counter[str] = Counter()
    budget = _INFLATED + _INFLATED_OF_ONE * source.size
    for before, after in zip((None, *records), (*records, None), strict=True):
        if torch_made:
            problems += _check_gap(archive.ordered, before, after, directory.end.directory_offset)
        if after is None:
            continue
        if not torch_made:
            problems += _check_loosely(archive.ordered, after)
        if after.is_stored:
            problems += _check_record(after, next(crcs), report)
        elif not after.is_readable or after.size > budget:
            unread[_DENSE if after.is_readable else _CLOSED] += 1
        else:
            budget -= after.size
            problems += _check_record(after, _inflated_crc(archive.ordered, after), report)
    problems.sort(key=lambda problem: problem.offset or 0)
    for problem in problems:
        report.add(_with_tensors(problem, outline))
    if outline is not None and not any(problem.record == PICKLE for problem in problems):
        _check_storages(outline, report)
    for record in ambiguous_parts(directory):
        message = "several records have this name and differ: readers take one or another"
        report.add(Problem("directory", message, record.name, record.header_offset))
    if report.unchecked:
        report.without_checksums(f"{report.unchecked} records were saved without checksums")
    for why, count in unread.items():
        report.skipped(f"{count} records are {why}: not checked")
    report.unchecked += unread.total()
    _check_purpose(source, directory, report)
    if not torch_made:
        report.notes.append("not laid out by torch: only the records were checked")
    elif directory.end.trailing:
        report.notes.append(f"{directory.end.trailing} bytes after the end of the archive")


def _check_record(
    record: RecordEntry, crc: int | OSError | None, report: VerifyReport
) -> Iterator[Problem]:
    """Compare and count the CRC-32 of a record.

    A plain record whose CRC-32 is 0 was saved without one: the comparison of its data descriptor
    with the directory shows that no damage made it 0.

    Args:
        crc: of its bytes, or the error that prevented reading them.
        report: gets the counts.
    """
    if not (record.size or record.compressed_size):
        return
    if isinstance(crc, OSError):
        text = f"cannot be read: {crc.strerror}"
        yield Problem("read", text, record.name, record.data_offset)
        return
    mismatch = crc_mismatch(crc, record.crc)
    if mismatch is not None and crc is not None and not record.crc and _is_plain(record):
        report.unchecked += 1
        return
    if crc is not None:
        report.checked_bytes += record.size
    if mismatch is not None:
        text = f"its {record.size} bytes are damaged: {mismatch}"
        yield Problem("checksum", text, record.name, record.data_offset)


def _with_tensors(problem: Problem, outline: Outline | None) -> Problem:
    if outline is None or problem.record is None or not problem.record.startswith("data/"):
        return problem
    users = outline.users.get(problem.record.removeprefix("data/"), [])
    return replace(problem, tensors=tuple(users))


def _outline(source: Source, directory: Directory, report: VerifyReport) -> Outline | None:
    """Return what the pickle describes; a pickle that cannot be parsed is noted, or a problem."""
    try:
        outline = zip_outline(source, directory)
    except ours(CheckpointFileError, PickleLimitError) as error:
        record = directory.find(PICKLE)
        text = f"the tensors' keys are not known: {error}"
        if isinstance(error, PickleLimitError) or (record and record.size > _judged(record)):
            report.skipped(f"{text}; nor whether all their records are there")
        elif record is None or _is_whole_pickle(source, record):
            report.notes.append(text)
        else:
            report.add(Problem("pickle", "it is cut short, or damaged", PICKLE, record.data_offset))
        return None
    if outline is not None and outline.notes:
        report.notes.append(outline.notes[0])
    return outline


def _judged(record: RecordEntry) -> int:
    """Return the most bytes of a pickle that is looked through: that takes a second for a MB."""
    return max(_MOST_PICKLE, record.compressed_size)


def _check_storages(outline: Outline, report: VerifyReport) -> None:
    """Compare the records' sizes with those of the storages in the pickle."""
    for key, entry in outline.storages.items():
        name, size = f"data/{key}", entry.held
        if entry.record and size >= entry.nbytes:
            if size - entry.nbytes >= ITEM_BYTES[entry.dtype]:  # it grew while it was pickled
                report.notes.append(f"{name} has {size} bytes, the pickle says {entry.nbytes}")
            continue
        message = "the pickle refers to it, but it is missing"
        if entry.record:
            message = f"has only {size} bytes, the pickle says {entry.nbytes}"
        report.add(Problem("storage", message, name, None, tuple(outline.users.get(key, ()))))


def _inflated_crc(source: Source, record: RecordEntry) -> int | OSError | None:
    """Return the CRC-32 of what a record inflates to; errors as `_crc_or_error`."""

    def read() -> int:
        crc = 0
        for piece in inflated(source, record):
            crc = crc32(piece, crc)
        return crc

    return _crc_or_error(read)


def _is_plain(record: RecordEntry) -> bool:
    """Return whether an entry looks like torch's: no versions, times or attributes."""
    return record.stamp == _stamp(record) and record.flags == _flags(record)


def _stamp(record: RecordEntry) -> tuple[int, ...]:
    return _DEFLATED if record.method == DEFLATED else _PLAIN


def _flags(record: RecordEntry) -> int:
    return UTF8 | zip_format.HAS_DESCRIPTOR if record.size else UTF8


def _is_torch_made(source: Source, directory: Directory) -> bool:
    """Return whether torch wrote the archive, and no other program changed it since.

    Then most entries look like torch's, and no other entry has the date of its local header: such a
    date is no damage, but the work of another program.
    """
    others = [record for record in directory.records if not _is_plain(record)]
    dated = any(_is_dated(source, record) for record in others)
    return 2 * len(others) < len(directory.records) and not dated


def _is_dated(source: Source, record: RecordEntry) -> bool:
    """Return whether an entry has a date, which its local header confirms."""
    when = record.stamp[2:4]
    if not any(when):
        return False
    length = LOCAL.size + len(record.full_name)
    try:
        header = parse_local_header(source.read_at(record.header_offset, length), record.name)
    except ours(CorruptCheckpointError, OSError):
        return False
    return header.name == record.full_name and header.when == when


# -- the structure ---------------------------------------------------------------------------------


def _check_ends(source: Source, directory: Directory, torch_made: bool) -> Iterator[Problem]:
    """Check the central directory's entries, and the records at the end of the file.

    Raises:
        OSError: the end of the file cannot be read.
    """
    end = directory.end
    if not torch_made:
        if not end.agrees:
            yield Problem("directory", "the end records disagree", None, end.offset)
        length = source.read_at(end.offset + zip_format.END.size - 2, 2)
        if int.from_bytes(length, "little") > end.trailing:
            yield Problem("truncated", "its comment is cut short", None, end.offset)
        return
    for record in directory.records:
        wide = zip_layout.zip64_field(record.size, record.compressed_size, record.header_offset)
        sound = _is_plain(record) and record.extra == wide and (record.size or not record.crc)
        if not sound:
            yield Problem("directory", "fields of its entry are damaged", record.name)
    start = end.directory_offset + end.directory_size
    expected = zip_layout.end_records(
        len(directory.records), end.directory_size, end.directory_offset
    )
    if source.read_at(start, min(len(expected), directory.size - start)) != expected:
        yield Problem("directory", "the records at the end of the file are damaged", None, start)


def _check_gap(
    source: Source, before: RecordEntry | None, after: RecordEntry | None, stop: int
) -> Iterator[Problem]:
    """Compare the bytes between two records with what torch writes there.

    Args:
        before, after: the records; None at the beginning and at the end.
        stop: where the last record's bytes end (bytes).

    Raises:
        RemoteError: a remote store fails.
    """
    start = before.data_end if before is not None else 0
    end = after.data_offset if after is not None else stop
    if end - start > _LONGEST_GAP:
        yield Problem("unaccounted", f"{end - start} bytes belong to no record", None, start)
        return
    try:
        data = source.read_at(start, end - start)
    except RemoteError:
        raise
    except ours(OSError) as error:
        text = f"{end - start} bytes cannot be read: {error.strerror}"
        yield Problem("read", text, None, start)
        return
    descriptor = b""
    if before is not None and before.has_descriptor:
        sizes = before.compressed_size, before.size
        descriptor = zip_layout.descriptor(before.crc, *sizes, before.header_offset)
    header = after.header_offset - start if after is not None else len(data)
    if before is not None and data[: min(header, len(descriptor))] != descriptor:
        text = "its data descriptor is not what the directory says"
        yield Problem("descriptor", text, before.name, start)
    if header > len(descriptor):
        where = f"after {before.name}" if before is not None else "at the beginning"
        text = f"{header - len(descriptor)} bytes {where} belong to no record"
        yield Problem("unaccounted", text, None, start + len(descriptor))
    if after is not None and data[header:] != _header(after, len(data) - header):
        text = "its local header is not what the directory says"
        yield Problem("header", text, after.name, after.header_offset)


def _header(record: RecordEntry, length: int) -> bytes | None:
    """Return the local header of `length` bytes that torch writes, None if there is none."""
    zip64 = len(zip_layout.zip64_field(record.size, 0, record.header_offset))
    extra = length - LOCAL.size - len(record.full_name)
    padding = extra - zip64 - FIELD.size
    if padding < 0 or extra > U16:
        return None
    size, kind = record.size, (record.flags, record.method, record.stamp[1])
    return zip_layout.local_header(record.full_name, size, record.header_offset, padding, *kind)


def _check_loosely(source: Source, record: RecordEntry) -> Iterator[Problem]:
    """Check what torch's reader uses of a record of another writer.

    Raises:
        OSError: the file cannot be read.
    """
    disk, _, attributes = record.stamp[4:]
    if disk not in (0, 1):
        text = "its entry says that it is in another part of the archive"
        yield Problem("directory", text, record.name)
    elif attributes & _IS_FOLDER and record.size:
        yield Problem("directory", "its entry says that it is a folder", record.name)
    data = source.read_at(record.header_offset, record.data_offset - record.header_offset)
    contradiction = _contradiction(parse_local_header(data, record.name), record)
    if contradiction:
        yield Problem("header", contradiction, record.name, record.header_offset)


def _contradiction(header: LocalHeader, record: RecordEntry) -> str | None:
    """Return what differs between a local header and the directory; torch reads both."""
    if header.method != record.method or (header.flags ^ record.flags) & zip_format.REFUSED:
        return "its local header has another compression than the directory"
    if header.flags & zip_format.HAS_DESCRIPTOR:
        return None  # sizes and CRC follow the data
    wide = zip_format.zip64_values(header.extra)
    sizes = [
        wide.pop(0) if size == U32 and wide else size
        for size in (header.size, header.compressed_size)
    ]
    if (header.crc, *sizes) == (record.crc, record.size, record.compressed_size):
        return None
    return "its local header holds other sizes or another CRC than the directory"


# -- what the archive is for -----------------------------------------------------------------------


def _check_purpose(source: Source, directory: Directory, report: VerifyReport) -> None:
    """Report what keeps torch from loading an archive.

    Raises:
        OSError: the file cannot be read.
    """
    records = directory.records
    names = {record.name for record in records}
    # torch takes the folder of all records from the first one
    inside = b"/" in records[0].full_name
    if not inside and any(record.full_name == PICKLE.encode() for record in records):
        message = "its records are in no folder, where torch looks for them"
        report.add(Problem("directory", message, records[0].full_name.decode("utf-8", "replace")))
    elif PICKLE in names:
        for problem in _checkpoint(source, directory, names):
            report.add(problem)
    elif any(_STORAGE.fullmatch(name) for name in names):
        report.add(Problem("pickle", "there is no such record: torch cannot load it", PICKLE))
    else:
        what = "an archive" if report.found else "a whole archive"
        report.undecided(f"{what}, but no checkpoint of torch: there is no {PICKLE} in it")


def _checkpoint(source: Source, directory: Directory, names: set[str]) -> Iterator[Problem]:
    folder = directory.archive_name
    for record in directory.records:
        if record.name.startswith("/"):
            message = f"it is not in the folder {folder!r}: torch does not load the archive"
            yield Problem("directory", message, record.name)
        elif is_part(record.name) and not record.is_readable:
            message = "it is encrypted, or compressed with a method that torch cannot read"
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
    except ours(CheckpointFileError):
        return True  # its checksum says what is wrong


def _is_whole_pickle(source: Source, record: RecordEntry) -> bool:
    """Return whether a record is a pickle to its end.

    Formats of other pickle modules, and what is too large, are not judged: True.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        data = read_record(source, record, _judged(record))
    except ours(CheckpointFileError):
        return True  # its checksum says what is wrong
    if not data.startswith(b"\x80"):
        return bool(data)
    try:
        for _ in pickletools.genops(io.BytesIO(data)):
            pass
    except ours(ValueError, OverflowError, EOFError, Warning):  # where warnings are errors
        return False
    return True
