"""Verifying checkpoints: every checksum and the whole structure.

Nothing is unpickled and torch is not needed. Files that stock torch wrote can be verified, too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

from fastserial.checkpoints.verify.file_list import is_file_list, verify_file_list
from fastserial.checkpoints.verify.folder import verify_folder
from fastserial.checkpoints.verify.report import Problem, VerifyReport
from fastserial.checkpoints.verify.zip import FilePart, RemotePart, verify_zip
from fastserial.config import Config, current
from fastserial.errors import (
    ConfigError,
    CorruptCheckpointError,
    PickleLimitError,
    UnreadableCheckpointError,
)
from fastserial.files.linux import cached_fraction, synced
from fastserial.files.remote import RemoteSource, is_url
from fastserial.files.sources import stamp
from fastserial.formats.container import (
    Format,
    LegacyContainer,
    SafetensorsContainer,
    detect,
    format_of_head,
    is_dcp_folder,
)
from fastserial.formats.source import DescriptorSource
from fastserial.interrupts import Descriptors, ours

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_REASONS = {
    Format.FOLDER: "a directory: verify the files in it (`checkpoints_in`)",
    Format.SHARD: f"{Format.SHARD.value}: verify its folder",
}
_STAYS = 0.01  # of a file, for pages that another process reads meanwhile
_OTHERS = (".distcp", ".npz", ".zip", ".whl", ".jar", ".tmp")


def verify(
    path: str | os.PathLike[str], config: Config | None = None, *, cold: bool = False
) -> VerifyReport:
    """Check a checkpoint: CRC-32 of every record, and the structure of the container.

        report = fastserial.verify("ckpt.pt", cold=True)
        assert report.ok, report

    Legacy and safetensors files have no checksums: only their structure is checked, and the report
    says so (`no_checksums`). Where a part cannot be checked, the status is `unchecked`. In a folder
    of torch.distributed.checkpoint every item of every file is checked. The files that a list names
    (an index of shards, `fastserial_complete.json`) must exist.

    Args:
        path: the file, its URL, or the folder.
        config: block size, queue depth and threads; by default the options in force.
        cold: drop it from the page cache first, so that what the device holds is checked.

    Returns:
        What was found. Damage is reported, never raised; so is a file that cannot be read.

    """
    return _verify(os.fspath(path), None, config or current(), cold)


def _verify(name: str, opened: int | None, settings: Config, cold: bool = False) -> VerifyReport:
    """Check a checkpoint, by its descriptor if it is open."""
    began = perf_counter()
    report = VerifyReport(name)
    reason, changed = None, False
    try:
        with Descriptors() as files:
            if is_url(name):
                if cold:
                    report.notes.append("`cold` has no effect: a URL is not in the page cache")
                changed = _verify_remote(name, report)
            else:
                if cold:
                    settings, reason = replace(settings, direct=True), _evict(name)
                fd = opened
                if fd is None:
                    fd = files.open(name, os.O_RDONLY | os.O_NONBLOCK)
                before = os.fstat(fd)
                report.bytes, seen = before.st_size, stamp(fd, before)
                found = detect(DescriptorSource(fd), name)
                if found is Format.DCP:
                    changed = verify_folder(name, settings, report)
                else:
                    _verify_file(fd, name, found, settings, report)
                    changed = found is not Format.FOLDER and not seen.holds_for(fd)
    except ours(CorruptCheckpointError) as error:
        report.add_error(error)
    except ours(PickleLimitError) as error:
        report.skipped(str(error))
    except ours(ConfigError, UnreadableCheckpointError) as error:
        reason = str(error)
    except ours(ValueError) as error:  # no path: a byte that no name has, or a lone surrogate
        reason = str(error)
    except ours(OSError) as error:
        reason = error.strerror or str(error)
    if changed:
        report.status, reason = "unreadable", "it changed while it was read: verify it again"
    if reason is not None:
        report.undecided(reason)
    report.seconds = perf_counter() - began
    return report


def _verify_file(fd: int, name: str, found: Format, settings: Config, report: VerifyReport) -> None:
    if found in (Format.ZIP, Format.DAMAGED_ZIP):
        verify_zip(FilePart(fd, name, settings), report)
    elif found.is_damage:
        report.add(Problem("truncated", found.value, None, 0))
    elif found in (Format.LEGACY, Format.SAFETENSORS):
        report.format = found.value
        report.without_checksums(f"{found.value} files have no checksums")
        _verify_structure(fd, found, report)
    elif found is Format.OTHER and is_file_list(name):
        verify_file_list(fd, name, report)
    else:
        report.undecided(_REASONS.get(found, found.value))


def _verify_remote(url: str, report: VerifyReport) -> bool:
    """Check a file at a URL; return whether it changed meanwhile."""
    source = RemoteSource(url)
    try:
        _verify_source(source, report)
    except ours(CorruptCheckpointError):
        if not source.is_changed():
            raise
    return source.is_changed()


def _verify_source(source: RemoteSource, report: VerifyReport) -> None:
    report.bytes = source.size
    found = detect(source, source.name)
    if found in (Format.ZIP, Format.DAMAGED_ZIP):
        with contextlib.closing(RemotePart(source)) as archive:
            verify_zip(archive, report)
    elif found.is_damage:
        report.add(Problem("truncated", found.value, None, 0))
    elif found is Format.SAFETENSORS:
        report.format = found.value
        report.without_checksums("safetensors files have no checksums")
        report.records = len(SafetensorsContainer(source).outline.storages)
    else:
        report.undecided("of files at URLs, zip and safetensors can be verified: download it")


def _verify_structure(fd: int, found: Format, report: VerifyReport) -> None:
    """Check sections, shapes, offsets and sizes of a legacy or safetensors file.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: its pickles have opcodes that are not read.
        PickleLimitError: they are larger than the limits.
        OSError: the file cannot be read.
    """
    source = DescriptorSource(fd)
    if found is Format.SAFETENSORS:
        report.records = len(SafetensorsContainer(source).outline.storages)
        return
    container = LegacyContainer(source)
    for key, text in container.outline.problems.items():
        report.add(Problem("pickle", f"tensor {key or '(root)'}: {text}"))
    end = container.file.end
    if end != source.size:
        text = f"{source.size - end} bytes follow the last storage"
        report.add(Problem("unaccounted", text, None, end))
    if not container.outline.complete:
        report.skipped("not all tensors were compared with their storages: there are too many")
    report.records = len(container.outline.storages)


def refuse_damaged(
    path: str | os.PathLike[str], fd: int | None = None, config: Config | None = None
) -> VerifyReport:
    """Verify a checkpoint; return the report, without problems.

    Args:
        path: its name.
        fd: a descriptor of it, which the caller reads afterwards: the path may change meanwhile.
        config: as for `verify`.

    Raises:
        CorruptCheckpointError: it is damaged; names the first problem.
    """
    report = _verify(os.fspath(path), fd, config or current())
    if report.problems:
        first = report.problems[0]
        where = os.path.join(report.path, first.file) if first.file else report.path
        raise CorruptCheckpointError(first.message, path=where, record=first.record)
    return report


def checkpoints_in(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the checkpoints in a directory and those below, sorted.

    These are files that begin like a checkpoint or have a suffix of one, and folders of
    torch.distributed.checkpoint, instead of their shards. Directories that cannot be read are
    yielded, too: `verify` says why. Links to directories are not followed, links to files only if
    they lead out of the directory; temporary files and other formats are skipped.
    """
    unread: list[OSError] = []
    inside = os.path.join(os.path.realpath(folder), "")
    for parent, folders, files in os.walk(folder, onerror=unread.append):
        folders.sort()
        if is_dcp_folder(parent):
            yield parent
        for name in sorted(files):
            path = os.path.join(parent, name)
            if os.path.exists(path):
                twice = os.path.islink(path) and os.path.realpath(path).startswith(inside)
                if twice or not os.path.isfile(path):
                    continue
            if _is_checkpoint(path):
                yield path
    yield from sorted(str(error.filename) for error in unread)


def _is_checkpoint(path: str) -> bool:
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _SUFFIXES or suffix in _OTHERS:
        return suffix in _SUFFIXES
    try:
        with Descriptors() as files:
            fd = files.open(path, os.O_RDONLY | os.O_NONBLOCK)
            return format_of_head(DescriptorSource(fd)) is not None
    except ours(OSError):
        return False


def _evict(path: str) -> str | None:
    """Write a file, or the files in a folder, to the device, and drop them from the page cache.

    Their contents do not change. Other programs then read them from the device again.

    Returns:
        Why some of it stays in the page cache, None if nothing does.

    Raises:
        OSError: a file cannot be opened, or its device failed.
    """
    for name in _files(path):
        with Descriptors() as files:
            fd = files.open(name, os.O_RDONLY | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            synced(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if (cached_fraction(fd, 0, os.fstat(fd).st_size) or 0.0) > _STAYS:
                return (
                    f"{name} stays in the page cache, so not all was read from the device: a "
                    "program has it mapped, or its file system is in memory"
                )
    return None


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)
