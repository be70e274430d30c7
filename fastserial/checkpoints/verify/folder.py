"""Verifying a folder of torch.distributed.checkpoint: every item of every file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from fastserial.checkpoints.verify.file_list import is_file_name
from fastserial.checkpoints.verify.report import Problem, VerifyReport
from fastserial.checkpoints.verify.zip import FilePart, verify_zip
from fastserial.checksums import crc_mismatch
from fastserial.config import Config
from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError
from fastserial.formats.container import FolderContainer, ZipContainer
from fastserial.formats.dcp import Metadata
from fastserial.formats.stored import Chunk
from fastserial.formats.zip_format import END, END_SIGNATURE, LOCAL_SIGNATURE
from fastserial.interrupts import Descriptors, cleanup, ours
from fastserial.progress import ProgressBar

_SHOWN = 3
_FEWER_BYTES = "it has fewer bytes than its shape says"
_OF_ANOTHER = "it is that of another checkpoint"
_EXTENDED = "items went through an extension (a compression): not checked"
_BARE = "items have no checksum"
_UNKNOWN = "items have a dtype that is not known here: not checked"
_OTHER_DTYPE = (
    "items have another dtype than the metadata says, as after stock's enable_plan_caching; "
    "dcp.load takes what is in the item"
)


def verify_folder(path: str, config: Config, report: VerifyReport) -> bool:
    """Check the metadata, and the CRC-32 and the structure of all items.

    Returns:
        Whether another checkpoint was completed there meanwhile.

    Raises:
        OSError: the folder cannot be read.
        PickleLimitError: its metadata takes too long to read.
    """
    folder = FolderContainer(path)
    report.bytes = folder.nbytes
    if not folder.metadata_files:
        report.add(Problem("missing", "there is none: the save was not completed", ".metadata"))
        return False
    needed: set[str] = set()
    for name in folder.metadata_files:
        try:
            metadata = folder.read_metadata(name)
        except ours(CorruptCheckpointError) as error:
            report.add(Problem("directory", error.message, file=name))
            continue
        except ours(UnreadableCheckpointError) as error:
            report.undecided(f"{name}: {error.message}")
            continue
        report.format = folder.format
        _check_metadata(metadata, name, report)
        needed |= _ItemChecks(path, config, report).check(metadata.items())
    spare = [name for name in folder.shards if name not in needed]
    if spare and report.format is not None:
        shown = ", ".join(spare[:_SHOWN]) + (", ..." if len(spare) > _SHOWN else "")
        report.notes.append(f"{len(spare)} files belong to no checkpoint that torch loads: {shown}")
    return FolderContainer(path).version != folder.version


def _check_metadata(metadata: Metadata, name: str, report: VerifyReport) -> None:
    """Check that all chunks have a location, and that they cover their tensors."""
    for item in metadata.missing():
        report.add(Problem("missing", "the metadata has no location for it", item, file=name))
    for key, stored in metadata.tensors.items():
        if stored.held != stored.numel:
            text = f"its chunks have {stored.held} elements, the tensor {stored.numel}"
            report.add(Problem("missing", text, key, None, (key,), name))
    if not metadata.framed:
        report.without_checksums(f"{name} has no checksum, since fastserial did not write it")


class _ItemChecks:
    """Checks the items of a metadata file, and counts the items that have a note in common."""

    def __init__(self, path: str, config: Config, report: VerifyReport) -> None:
        self._path = path
        self._bar = ProgressBar(path if config.progress else None)
        self._config = replace(config, progress=False)  # all items have one bar
        self._report = report
        self._counts: Counter[str] = Counter()

    def check(self, items: Iterable[Chunk]) -> set[str]:
        """Check all items; return the names of their files."""
        files: dict[str, list[Chunk]] = {}
        for item in items:
            files.setdefault(item.file, []).append(item)
        self._bar.expect(sum(item.length for inside in files.values() for item in inside))
        with cleanup(self._bar.close):
            for name, inside in sorted(files.items()):
                self._report.records += len(inside)
                self._check_file(name, sorted(inside, key=lambda item: item.offset))
        for text in (_EXTENDED, _UNKNOWN):
            if self._counts[text]:
                self._report.skipped(f"{self._counts[text]} {text}")
        if self._counts[_BARE]:
            self._report.without_checksums(f"{self._counts[_BARE]} {_BARE}")
        self._report.unchecked += self._counts.total() - self._counts[_OTHER_DTYPE]
        if self._counts[_OTHER_DTYPE]:
            self._report.notes.append(f"{self._counts[_OTHER_DTYPE]} {_OTHER_DTYPE}")
        return set(files)

    def _check_file(self, name: str, items: list[Chunk]) -> None:
        if not is_file_name(name):
            text = "the metadata names a file that cannot be in the folder"
            self._report.add(Problem("directory", text, file=name))
            return
        try:
            with Descriptors() as opened:
                fd = opened.open(os.path.join(self._path, name), os.O_RDONLY | os.O_NONBLOCK)
                size = os.fstat(fd).st_size
                before: Chunk | None = None  # of those so far, the one that ends last
                for item in items:
                    self._bar.update(item.length)
                    if before is not None and item.offset < before.offset + before.length:
                        if item.length and not _is_same_data(item, before):
                            self._add(item, "directory", f"its bytes are also in {before.name}")
                        continue  # nothing is read twice
                    before = item
                    if item.offset + item.length > size:
                        text = f"the file ends at {size}, before the item does"
                        self._add(item, "truncated", text)
                    elif item.is_extended:
                        self._counts[_EXTENDED] += 1
                    else:
                        self._check_item(fd, item)
        except ours(FileNotFoundError):
            keys = tuple(dict.fromkeys(item.key for item in items))
            text = f"it is not there, and {len(items)} items are in it"
            self._report.add(Problem("missing", text, None, None, keys, name))
        except ours(CorruptCheckpointError) as error:
            self._report.add(Problem("truncated", error.message, file=name))
        except ours(OSError) as error:
            text = f"it cannot be read: {error.strerror}"
            self._report.add(Problem("read", text, file=name))

    def _add(self, item: Chunk, kind: str, message: str, offset: int = 0) -> None:
        where = item.offset + offset
        self._report.add(Problem(kind, message, item.name, where, (item.key,), item.file))

    def _check_item(self, fd: int, item: Chunk) -> None:
        held = FilePart(fd, item.file, self._config, item.offset, item.length)
        last = max(0, item.length - END.size)
        head = held.source.read_at(0, min(len(LOCAL_SIGNATURE), item.length))
        tail = held.source.read_at(last, item.length - last)
        is_archive = head == LOCAL_SIGNATURE or tail.startswith(END_SIGNATURE)
        if (item.nbytes or 0) > item.length and not (is_archive and item.start is None):
            self._add(item, "storage", _FEWER_BYTES)
        elif is_archive:
            self._check_archive(held, item)
        else:
            self._check_bytes(held, item)

    def _check_bytes(self, held: FilePart, item: Chunk) -> None:
        """Compare the CRC-32 of an item that is no archive."""
        if item.crc is None:
            self._counts[_BARE] += 1
            return
        if item.box is not None and item.nbytes is None:
            self._counts[_UNKNOWN] += 1
            return
        length = item.length if item.nbytes is None or item.start is None else item.nbytes
        start = item.start or 0
        if start + length > item.length:
            self._add(item, "storage", _FEWER_BYTES)
            return
        (crc,) = held.checksums([(start, length)])
        if isinstance(crc, OSError):
            self._add(item, "read", f"cannot be read: {crc.strerror}", start)
            return
        self._report.checked_bytes += length
        self._compare_crc(item, "damaged", crc, item.crc, start)

    def _check_archive(self, held: FilePart, item: Chunk) -> None:
        """Check an item that is an archive of `torch.save`."""
        found = VerifyReport(item.name)
        try:
            verify_zip(held, found)
            if found.ok:
                self._compare(held, item)
        except ours(CorruptCheckpointError) as error:
            found.add_error(error)
        except ours(UnreadableCheckpointError) as error:
            found.undecided(str(error))
        if found.status == "unreadable":
            self._report.undecided(f"{item.name}: {found.notes[-1]}")
        elif found.status == "unchecked":
            self._report.skipped(f"{item.name}: {'; '.join(found.notes)}")
            self._report.unchecked += 1
        for problem in found.problems:
            where = f"{problem.record}: " if problem.record else ""
            self._add(item, problem.kind, where + problem.message, problem.offset or 0)
        self._report.checked_bytes += found.checked_bytes
        if found.no_checksums and not found.found:
            self._counts[_BARE] += 1

    def _compare(self, held: FilePart, item: Chunk) -> None:
        """Compare a whole archive with what the metadata says of it."""
        if item.box is None:
            if item.crc is not None:
                (found,) = held.checksums([(0, item.length)])
                self._compare_crc(item, _OF_ANOTHER, found, item.crc)
            return
        outline = ZipContainer(held.source).outline
        if outline.notes or [tensor.key for tensor in outline.tensors] != [""]:
            return  # only torch knows how the tensor is saved
        (tensor,) = outline.tensors
        if tensor.shape == item.box.sizes and tensor.dtype == item.dtype:
            storage = outline.storages.get(tensor.storage or "")
            if storage is not None and storage.crc is not None and item.crc and item.nbytes:
                self._compare_crc(item, _OF_ANOTHER, storage.crc, item.crc)
        elif tensor.shape == item.box.sizes and item.start is None:  # a load takes the item's dtype
            self._counts[_OTHER_DTYPE] += 1
        else:
            text = f"a {tensor.dtype} {list(tensor.shape)}, the metadata says {item.dtype}"
            self._add(item, "storage", f"{_OF_ANOTHER}: {text} {list(item.box.sizes)}")

    def _compare_crc(
        self, item: Chunk, what: str, found: int | OSError | None, expected: int, start: int = 0
    ) -> None:
        mismatch = crc_mismatch(None if isinstance(found, OSError) else found, expected)
        if mismatch is not None:
            self._add(item, "checksum", f"{what}: {mismatch}", start)


def _is_same_data(one: Chunk, other: Chunk) -> bool:
    """Return whether items are one in the file, and everything else said of them is the same."""
    first, second = (item._replace(key="", box=None) for item in (one, other))
    return first == second and (one.box and one.box.sizes) == (other.box and other.box.sizes)
