"""Proving what is on the disk: every checksum and the whole structure of a checkpoint.

Nothing is unpickled and torch is not needed. Files that stock torch wrote verify, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import perf_counter

from fastserial.checkpoints.dcp_folder import is_dcp_folder
from fastserial.checkpoints.rank_folder import find_rank_folder
from fastserial.checkpoints.verify.folder import FolderResult, verify_folder
from fastserial.checkpoints.verify.legacy import verify_legacy
from fastserial.checkpoints.verify.rank_folder import verify_rank_folder
from fastserial.checkpoints.verify.report import Findings, Problem, Status, VerifyReport
from fastserial.checkpoints.verify.zip import ZipResult, verify_zip
from fastserial.config import Config, current
from fastserial.errors import CorruptCheckpointError, PickleLimitError
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.detect import Format, detect, format_of_head
from fastserial.interrupts import Descriptors

__all__ = ["Problem", "VerifyReport", "checkpoints_in", "refuse_damaged", "verify"]

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_REASONS = {
    Format.FOLDER: "a directory: verify the files in it (`checkpoints_in`)",
    Format.SHARD: f"{Format.SHARD.value}: verify its folder",
    Format.SAFETENSORS: "neither a zip nor a legacy checkpoint",
    Format.OTHER: "neither a zip nor a legacy checkpoint",
}
_OTHERS = (".distcp", ".npz", ".safetensors", ".zip", ".whl", ".jar", ".tmp")


def verify(path: str | os.PathLike[str], config: Config | None = None) -> VerifyReport:
    """Check a checkpoint: CRC-32 of every record, and the structure of the container.

    A legacy file has no checksums; its structure is checked, which the report says. In a folder of
    torch.distributed.checkpoint every item of every file is checked, in one of torch_checkpointing
    the file of every item and rank.

    Args:
        path: the file, or the folder.
        config: block size, queue depth and threads; by default the options in force.

    Returns:
        What was found. Damage is reported, never raised; so is a file that cannot be read.
    """
    return _verify(os.fspath(path), None, config)


def _verify(name: str, opened: int | None, config: Config | None) -> VerifyReport:
    """Check a checkpoint, by its descriptor if it is open."""
    began = perf_counter()
    findings = Findings()
    kind: str | None = None
    result: ZipResult | FolderResult = ZipResult()
    size = 0
    reason: str | None = None
    changed = False
    try:
        with Descriptors() as files:
            fd = opened
            if fd is None:
                fd = files.open(name, os.O_RDONLY | os.O_NONBLOCK)
            before = os.fstat(fd)
            size = before.st_size
            found = detect(fd, name)
            seen: FileStamp | None = stamp(fd, before)
            if found in (Format.ZIP, Format.DAMAGED_ZIP):
                kind = "zip"
                result = zip_result = verify_zip(fd, size, config or current(), findings)
                reason = zip_result.no_checkpoint
            elif found is Format.LEGACY:
                kind = "legacy"
                result.records = verify_legacy(fd, size, findings)
            elif found is Format.FOLDER and (checked := _folder(name, config, findings)):
                result = checked
                kind, size, seen = checked.format, checked.nbytes, None
                changed, reason = checked.changed, checked.reason
            else:
                reason = _REASONS.get(found, found.value)
            changed = changed or (seen is not None and not seen.holds_for(fd))
        if changed:
            reason = "it changed while it was read: verify it again"
    except CorruptCheckpointError as error:
        findings.add(Problem("truncated", error.message, error.record, error.offset))
    except PickleLimitError as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    status: Status = "damaged" if findings.found else "ok"
    if reason is not None:
        status = "unreadable" if status == "ok" or changed else status
        findings.note(reason)
    return VerifyReport(
        path=name,
        status=status,
        format=kind,
        bytes=size,
        seconds=perf_counter() - began,
        records=result.records,
        checked_bytes=result.checked_bytes,
        unchecked=result.unchecked,
        problems=tuple(findings.problems),
        found=findings.found,
        notes=tuple(findings.notes),
    )


def _folder(name: str, config: Config | None, findings: Findings) -> FolderResult | None:
    """Check a folder; None if it is no checkpoint."""
    if is_dcp_folder(name):
        return verify_folder(name, config or current(), findings)
    found = find_rank_folder(name)
    if found is None:
        return None
    return verify_rank_folder(name, found, lambda path: verify(path, config), findings)


def refuse_damaged(path: str | os.PathLike[str], fd: int | None = None) -> None:
    """Verify a checkpoint.

    Args:
        path: its name.
        fd: a descriptor of it, which is read afterwards: another file may get the name meanwhile.

    Raises:
        CorruptCheckpointError: it is damaged; tells the first problem.
    """
    report = _verify(os.fspath(path), fd, None)
    if report.problems:
        first = report.problems[0]
        where = os.path.join(report.path, first.file) if first.file else report.path
        raise CorruptCheckpointError(first.message, path=where, record=first.record)


def checkpoints_in(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the checkpoints in a directory and those below, sorted.

    Checkpoints are what starts as one, and what is called like one, and the folders of
    torch.distributed.checkpoint and torch_checkpointing (whose files are not yielded then).
    Symbolic links are not followed; temporary files and other formats are passed over.

    Raises:
        OSError: a directory cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        its: set[str] = set()
        if is_dcp_folder(parent):
            yield parent
        elif (found := find_rank_folder(parent)) is not None:
            its.update(found.files)
            yield parent
        for name in sorted(set(files) - its):
            path = os.path.join(parent, name)
            if not os.path.islink(path) and os.path.isfile(path) and _is_checkpoint(path):
                yield path


def _is_checkpoint(path: str) -> bool:
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _SUFFIXES or suffix in _OTHERS:
        return suffix in _SUFFIXES
    try:
        with Descriptors() as files:
            return format_of_head(files.open(path, os.O_RDONLY | os.O_NONBLOCK)) is not None
    except OSError:
        return False
