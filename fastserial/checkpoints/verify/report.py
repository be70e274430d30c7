"""The result of a verification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fastserial.errors import CorruptCheckpointError, TruncatedCheckpointError
from fastserial.printable import BoundedRepr

Status = Literal["ok", "damaged", "unchecked", "unreadable"]
_MOST = 1000


@dataclass(frozen=True, slots=True, repr=False)
class Problem(BoundedRepr):
    """One problem of a checkpoint.

    Attributes:
        kind: `checksum`, `header`, `descriptor`, `directory`, `pickle`, `storage`, `truncated`,
            `unaccounted`, `missing` or `read`.
        message: what, in a sentence.
        record: the record (zip), storage (legacy) or item (DCP), None if it is the container.
        offset: where in the file (bytes), None where unknown.
        tensors: keys of the tensors in that record, as far as the pickle gives them.
        file: its name in a folder, None if the checkpoint is a file.
    """

    kind: str
    message: str
    record: str | None = None
    offset: int | None = None
    tensors: tuple[str, ...] = ()
    file: str | None = None


@dataclass(slots=True, repr=False)
class VerifyReport(BoundedRepr):
    """The verification of one checkpoint.

    Attributes:
        path: the file, the folder of torch.distributed.checkpoint, or the list of files.
        status: `ok`: whole, and a checkpoint or another archive of torch; `damaged`: some reader
            gets other bytes than were written, or torch cannot load it; `unchecked`: no damage was
            found, but a part was not read (encrypted, compressed with a method that is not known
            here, beyond a limit); `unreadable`: it cannot be decided (no permission, or no
            checkpoint; other archives are checked, too).
        format: `zip`, `legacy`, `safetensors`, `dcp`, `file list` or None.
        bytes: size of the file, or of the folder's files.
        seconds: time it took.
        records: number of records (zip), storages (legacy), tensors (safetensors), items (DCP) or
            files (file list).
        checked_bytes: bytes whose CRC-32 was compared with the one in the file, damaged or not.
        unchecked: records (zip) or items (DCP) whose CRC-32 was not compared.
        no_checksums: it was saved without checksums, or a part of it: of that, only the structure
            was checked. Always so for legacy and safetensors files, whose formats have none.
        problems: what is wrong, at most 1000.
        found: how many problems there are.
        notes: what is worth mentioning but no damage.
    """

    path: str
    status: Status = "ok"
    format: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    records: int = 0
    checked_bytes: int = 0
    unchecked: int = 0
    no_checksums: bool = False
    problems: list[Problem] = field(default_factory=list)
    found: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether it was checked and is whole, as far as it has checksums (`no_checksums`)."""
        return self.status == "ok"

    @property
    def fully_checked(self) -> bool:
        """Whether it is whole, and checksums prove it: what `fastserial verify --strict` asks for.

        A list of files counts as checked when the files are there.
        """
        return self.ok and not self.no_checksums

    def add(self, problem: Problem) -> None:
        """Add a problem."""
        self.status = "damaged"
        self.found += 1
        if len(self.problems) < _MOST:
            self.problems.append(problem)

    def add_error(self, error: CorruptCheckpointError) -> None:
        """Add what a parser refused as a problem."""
        kind = "storage" if self.format == "legacy" and error.record else "directory"
        kind = "truncated" if isinstance(error, TruncatedCheckpointError) else kind
        self.add(Problem(kind, error.message, error.record, error.offset))

    def undecided(self, reason: str) -> None:
        """Note why it cannot be decided whether the rest is whole."""
        if self.status != "damaged":
            self.status = "unreadable"
        self.notes.append(reason)

    def skipped(self, reason: str) -> None:
        """Note which part was not read, and why."""
        if self.status == "ok":
            self.status = "unchecked"
        self.notes.append(reason)

    def without_checksums(self, what: str) -> None:
        """Note which part has no checksums."""
        self.no_checksums = True
        self.notes.append(f"{what}: structure only")
