"""Verifying a folder of torch.distributed.checkpoint: every item of every file."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from math import prod

from fastserial.checkpoints.dcp_folder import list_folder, read_metadata
from fastserial.checkpoints.verify.checksums import FilePart
from fastserial.checkpoints.verify.report import Findings, Problem
from fastserial.checkpoints.verify.zip import verify_zip
from fastserial.checksums import crc_mismatch
from fastserial.config import Config
from fastserial.errors import (
    CorruptCheckpointError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.formats.container import ZipContainer
from fastserial.formats.dcp import Item, Metadata
from fastserial.formats.zip.structs import DESCRIPTOR_SIGNATURE, END, END_SIGNATURE, LOCAL_SIGNATURE
from fastserial.interrupts import Descriptors
from fastserial.progress import ProgressBar, progress_bar

__all__ = ["verify_folder"]

_DESCRIPTOR_BYTES = 8
_SHOWN = 3


def verify_folder(path: str, config: Config, findings: Findings) -> None:
    """Check the metadata, and the CRC-32 and the structure of all items.

    Raises:
        OSError: the folder cannot be read.
        PickleLimitError: its metadata takes too long to read.
    """
    found = list_folder(path)
    findings.nbytes = 0
    before = _versions(path, found.metadata)
    for name in (*found.metadata, *found.shards):
        with contextlib.suppress(FileNotFoundError):
            findings.nbytes += os.stat(os.path.join(path, name)).st_size
    if not found.metadata:
        findings.add(Problem("missing", "there is none: the save was not completed", ".metadata"))
        return
    needed: set[str] = set()
    for name in found.metadata:
        try:
            metadata = read_metadata(path, name)
        except CorruptCheckpointError as error:
            findings.add(Problem("directory", error.message, file=name))
            continue
        except UnreadableCheckpointError as error:
            findings.reason = f"{name}: {error.message}"
            continue
        findings.format = "dcp"
        _check_metadata(metadata, name, findings)
        needed |= _Folder(path, metadata, config, findings).check()
    spare = [name for name in found.shards if name not in needed]
    if spare and findings.format is not None:
        shown = ", ".join(spare[:_SHOWN]) + (", ..." if len(spare) > _SHOWN else "")
        findings.note(f"{len(spare)} files belong to no checkpoint that torch loads: {shown}")
    findings.changed = _versions(path, found.metadata) != before


def _versions(path: str, names: list[str]) -> list[tuple[int, int] | None]:
    """Return what tells a file from the one that replaces it."""
    found: list[tuple[int, int] | None] = []
    for name in names:
        try:
            state = os.stat(os.path.join(path, name))
        except FileNotFoundError:
            found.append(None)
        else:
            found.append((state.st_ino, state.st_mtime_ns))
    return found


def _check_metadata(metadata: Metadata, name: str, findings: Findings) -> None:
    """Look whether all parts of all tensors have a place, and make up the tensors."""
    for item in metadata.missing:
        findings.add(Problem("missing", "its place is not told", item, file=name))
    for key, stored in metadata.tensors.items():
        held = sum(prod(chunk.sizes) for chunk in stored.chunks)
        if held != prod(stored.shape):
            text = f"its parts have {held} elements, the tensor {prod(stored.shape)}"
            findings.add(Problem("missing", text, key, None, (key,), name))
    if not metadata.ours:
        findings.note(f"{name} has no checksum: fastserial did not write it")


@dataclass(slots=True)
class _Folder:
    """Checks the files that a `.metadata` names."""

    path: str
    metadata: Metadata
    config: Config
    findings: Findings
    extended: int = 0
    bare: int = 0
    other_dtypes: int = 0

    def check(self) -> set[str]:
        """Check all files; return their names."""
        files: dict[str, list[Item]] = {}
        for item in self.metadata.items:
            files.setdefault(item.file, []).append(item)
        bar = progress_bar(self.config.progress, self.path)
        bar.expect(sum(item.length for item in self.metadata.items))
        try:
            self._check_files(files, bar)
        finally:
            bar.close()
        if self.extended:
            self.findings.note(
                f"{self.extended} items went through an extension (a compression): not checked"
            )
        if self.bare:
            self.findings.note(f"{self.bare} items have no checksum: not checked")
        if self.other_dtypes:
            self.findings.note(
                f"{self.other_dtypes} items have another dtype than the metadata says, as after "
                "stock's enable_plan_caching; dcp.load takes what is in the item"
            )
        self.findings.unchecked += self.extended + self.bare
        return set(files)

    def _check_files(self, files: dict[str, list[Item]], bar: ProgressBar) -> None:
        for name, items in sorted(files.items()):
            self.findings.records += len(items)
            if os.path.basename(name) != name:
                text = "the metadata names a file outside of the folder"
                self.findings.add(Problem("directory", text, None, file=name))
                continue
            try:
                with Descriptors() as opened:
                    path = os.path.join(self.path, name)
                    fd = opened.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    self._check_file(fd, sorted(items, key=lambda item: item.offset), bar)
            except FileNotFoundError:
                keys = tuple(dict.fromkeys(item.key for item in items))
                text = f"it is not there, and {len(items)} items are in it"
                self.findings.add(Problem("missing", text, None, None, keys, name))
            except OSError as error:
                text = f"it cannot be read: {error.strerror}"
                self.findings.add(Problem("read", text, None, file=name))

    def _check_file(self, fd: int, items: list[Item], bar: ProgressBar) -> None:
        size = os.fstat(fd).st_size
        for item in items:
            bar.update(item.length)
            if item.offset + item.length > size:
                text = f"the file ends at {size}, before the item does"
                self._add(item, "truncated", text)
            elif item.is_extended:
                self.extended += 1
            else:
                self._check_item(fd, item)

    def _add(self, item: Item, kind: str, message: str, offset: int = 0) -> None:
        keys = (item.key,)
        where = item.offset + offset
        self.findings.add(Problem(kind, message, item.name, where, keys, item.file))

    # -- one item ------------------------------------------------------------------------------

    def _check_item(self, fd: int, item: Item) -> None:
        config = replace(self.config, progress=False)  # all items have one bar
        try:
            held = FilePart(fd, item.file, config, item.offset, item.length)
        except TruncatedCheckpointError:
            self._add(item, "truncated", "the file became shorter")
            return
        source, last = held.source, max(0, item.length - END.size)
        head = source.read_at(0, min(len(LOCAL_SIGNATURE), item.length))
        tail = source.read_at(last, item.length - last)
        is_archive = head == LOCAL_SIGNATURE or tail.startswith(END_SIGNATURE)
        if (item.nbytes or 0) > item.length and not (is_archive and _says_itself(item)):
            self._add(item, "storage", "it has not as many bytes as its shape says")
        elif is_archive:
            self._check_archive(held, item)
        else:
            self._check_bytes(held, item)

    def _check_bytes(self, held: FilePart, item: Item) -> None:
        """Compare the CRC-32 of an item that is no archive."""
        known = item.known
        is_unknown = item.chunk is not None and item.nbytes is None  # a dtype that we do not know
        if known is None or known.crc is None or is_unknown:
            self.bare += 1
            return
        length = item.length if item.nbytes is None or known.start is None else item.nbytes
        start = known.start or 0
        if start + length > item.length:
            self._add(item, "storage", "it has not as many bytes as its shape says")
            return
        (crc,) = held.checksums([(start, length)])
        if isinstance(crc, OSError):
            self._add(item, "read", f"cannot be read: {crc.strerror}", start)
            return
        self.findings.checked_bytes += length
        mismatch = crc_mismatch(crc, known.crc)
        if mismatch is not None:
            self._add(item, "checksum", f"damaged: {mismatch}", start)

    def _check_archive(self, held: FilePart, item: Item) -> None:
        """Check an item that is an archive of `torch.save`."""
        found = Findings()
        try:
            verify_zip(held, found)
            if found.reason is None and not found.found:
                self._compare(held, item)
        except CorruptCheckpointError as error:
            found.add(Problem("directory", error.message, error.record, error.offset))
        except UnreadableCheckpointError as error:
            found.reason = str(error)
        if found.reason is not None:
            self.findings.reason = f"{item.name}: {found.reason}"
        for problem in found.problems:
            where = f"{problem.record}: " if problem.record else ""
            self._add(item, problem.kind, where + problem.message, problem.offset or 0)
        self.findings.checked_bytes += found.checked_bytes
        if found.unchecked and not found.found:
            self.bare += 1

    def _compare(self, held: FilePart, item: Item) -> None:
        """Compare what is in a whole archive with what the metadata says of it."""
        known, source = item.known, held.source
        if item.chunk is None:
            if known is not None and known.crc is not None:
                (crc,) = held.checksums([(0, source.size)])
                mismatch = crc_mismatch(None if isinstance(crc, OSError) else crc, known.crc)
                if mismatch is not None:
                    self._add(item, "checksum", f"{_OF_ANOTHER}: {mismatch}")
            return
        outline = ZipContainer(source).outline
        tensors = outline.tensors if not outline.notes else []
        if len(tensors) == 1 and not tensors[0].key:
            one = tensors[0]
            if one.shape == item.chunk.sizes and one.dtype != item.dtype and _says_itself(item):
                self.other_dtypes += 1
                return
            if (one.dtype, one.shape) != (item.dtype, item.chunk.sizes):
                text = f"{_OF_ANOTHER}: a {one.dtype} {list(one.shape)}, the metadata says"
                self._add(item, "storage", f"{text} {item.dtype} {list(item.chunk.sizes)}")
                return
        if known is None or known.start is None or not known.crc or not item.nbytes:
            return
        end = known.start + item.nbytes
        descriptor = source.read_at(end, min(_DESCRIPTOR_BYTES, source.size - end))
        crc = int.from_bytes(descriptor[len(DESCRIPTOR_SIGNATURE) :], "little")
        mismatch = crc_mismatch(crc, known.crc)
        if descriptor.startswith(DESCRIPTOR_SIGNATURE) and mismatch is not None:
            self._add(item, "checksum", f"{_OF_ANOTHER}: {mismatch}")


_OF_ANOTHER = "it is that of another checkpoint"


def _says_itself(item: Item) -> bool:
    """Return whether who loads an item looks into it for what it is."""
    return item.known is None or item.known.start is None
