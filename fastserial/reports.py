"""What a save or a load did, in fio's terms: bytes, seconds, bandwidth, engine."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

from fastserial.errors import UnmetOptionWarning
from fastserial.interrupts import Locked, ours
from fastserial.printable import printable

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_SHOWN = 20  # keys in a report's text
_log = logging.getLogger("fastserial")


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    index = 0
    while value >= base and index < len(units) - 1:
        value /= base
        index += 1
    digits = 0 if value >= 100 or index == 0 else 1
    return f"{value:.{digits}f}{units[index]}"


def format_bytes(count: int) -> str:
    """Return a byte count in both unit bases, such as `2.8GiB (3.0GB)`."""
    return f"{_scaled(count, 1024, _BINARY)} ({_scaled(count, 1000, _DECIMAL)})"


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth in both unit bases, such as `1581MiB/s (1658MB/s)`."""
    binary = _scaled(bytes_per_second, 1024, _BINARY)
    return f"{binary}/s ({_scaled(bytes_per_second, 1000, _DECIMAL)}/s)"


_MOST = 32  # distinct reasons that are counted, or warned of
_unmet: set[tuple[str, str]] = set()


def warn_unmet(option: str, why: str) -> None:
    """Warn, once in a process for each reason, that an option is not met.

    Args:
        option: as it was set, such as `direct=True`.
        why: what prevents it.
    """
    if (option, why) not in _unmet and len(_unmet) < _MOST:
        _unmet.add((option, why))
        warnings.warn(f"{option} has no effect here: {why}", UnmetOptionWarning, stacklevel=3)


class Transfer(NamedTuple):
    """The transfer type that was taken (see `Config.transfer`), and why it was."""

    word: str
    why: str


HOST_ONLY = Transfer("cpu", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the reports of saves and loads have in common.

    Attributes:
        path: the file, or the name of the file object.
        container: `zip`, `legacy`, or another format.
        bytes: how many were moved.
        seconds: from opening the file to its last byte or sync, the pickle included.
        engine: the engine that moved the bytes.
        fallback: why they were not moved in the fastest manner, or None.
        phases: seconds per phase.
        transfer: the transfer type taken, as in `Config.transfer`; `cpu` if no device took part.
        transfer_why: why it was taken, for tensors on devices.
    """

    path: str
    container: str
    bytes: int
    seconds: float
    engine: str
    fallback: str | None = None
    phases: dict[str, float] = field(default_factory=dict)
    transfer: str = HOST_ONLY.word
    transfer_why: str = HOST_ONLY.why

    @property
    def bandwidth(self) -> float:
        """Bytes per second over the whole of it."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values, bandwidth included."""
        return {**asdict(self), "bandwidth": self.bandwidth}

    def line(self, direction: str, details: str) -> str:
        """Return the report as one line, as fio prints them."""
        line = (
            f"{direction}: bw={format_bandwidth(self.bandwidth)}, io={format_bytes(self.bytes)}, "
            f"run={self.seconds * 1000:.0f}msec, engine={self.engine}, {details}"
        )
        return self._with_file(line)

    def _with_file(self, line: str) -> str:
        if self.transfer_why:
            line = f"{line}, transfer={self.transfer} ({printable(self.transfer_why)})"
        line = f"{line}, file={printable(self.path)}"
        return f"{line}, fallback={printable(self.fallback)}" if self.fallback else line


_AnyReport = TypeVar("_AnyReport", bound=Report)


def _notify(report: _AnyReport, take: Callable[[_AnyReport], object] | None, name: str) -> None:
    if take is not None:
        try:
            take(report)
        except ours(Exception):  # the bytes are safe: this must not look like a failed save or load
            _log.exception("%s failed for %r", name, report.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport:
    """How a `save_async` kept bytes that the program went on to change.

    Attributes:
        kind: `copy`; `blocking`: it was saved before the call returned.
        stall: seconds that the call took.
        copied: bytes copied at the call.
        budget: bytes that the copies might take; None: half of what was free.
    """

    kind: str
    stall: float
    copied: int = 0
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's part of a save or a load of many ranks.

    Attributes:
        rank: in the job.
        node: identifies the node.
        bytes: how many it wrote or read.
        sent_bytes, received_bytes: how many it exchanged with other ranks.
        phases: seconds; of a save `plan`, `wait` (for the other ranks), `compare` (with a base),
            `exchange`, `write`, `sync`; of a load `plan` (until the first byte was read), `own`
            (reading what this rank alone wanted), `share` (reading and exchanging what several
            wanted).
    """

    rank: int
    node: str
    bytes: int
    sent_bytes: int
    received_bytes: int
    phases: dict[str, float]

    def __str__(self) -> str:
        phases = ", ".join(f"{name}={s * 1000:.0f}msec" for name, s in self.phases.items())
        return (
            f"rank {self.rank}: io={format_bytes(self.bytes)}, "
            f"sent={format_bytes(self.sent_bytes)}, "
            f"received={format_bytes(self.received_bytes)}, {phases}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(Report):
    """One finished save.

        report = fastserial.save(state, "ckpt.pt")
        print(report.bytes, report.seconds, report.phases)

    Attributes:
        container: `zip`, `legacy` or `raw` (a FastFileWriter used as a plain file).
        engine: `buffered` for one plain write.
        direct: whether direct I/O was used.
        durable: whether file and directory were synced.
        durable_why: why they were not although the option asks for it, else empty.
        cloned: how many of `bytes` were cloned from the `base` of the save, not written.
        phases: `transfer`, `sync`, `commit`, `compare` with a `base`, and `serialize` for the rest,
            such as the pickle: they add up to `seconds`.
        snapshot: of a `save_async`, else None.
        ranks: of a save of many ranks, each rank's part; on rank 0.
        rank: of a save of many ranks, the one (in the job) whose report it is.
    """

    direct: bool
    durable: bool
    durable_why: str = ""
    cloned: int = 0
    snapshot: SnapshotReport | None = None
    ranks: tuple[RankReport, ...] = ()
    rank: int = 0

    def __str__(self) -> str:
        details = f"direct={int(self.direct)}, durable={int(self.durable)}"
        if self.durable_why:
            details += f" ({self.durable_why})"
        if self.cloned:
            details += f", cloned={format_bytes(self.cloned)}"
        if self.snapshot is not None:
            details += f", stall={self.snapshot.stall * 1000:.0f}msec"
        return "\n  ".join([self.line("WRITE", details), *map(str, self.ranks)])


_last_save: SaveReport | None = None


def publish_save(
    report: SaveReport,
    on_report: Callable[[SaveReport], object] | None = None,
    *,
    direct: object = "auto",
    again: bool = False,
) -> None:
    """Make a report the process's last one, and pass it to `on_report`.

    Args:
        direct: the option.
        again: it completes an earlier report of this save, which was logged and counted.
    """
    global _last_save
    _last_save = report
    if direct is True and not report.direct and report.fallback is not None:
        warn_unmet("direct=True", report.fallback)
    if not again:
        SAVES.add(report.bytes, report.seconds, report.fallback)
        _log.debug("%s", report)
    _notify(report, on_report, "on_report")


def last_save_report() -> SaveReport | None:
    """Return the report of the save that finished last in this process, or None.

        torch.save(state, "ckpt.pt")
        print(fastserial.last_save_report().bandwidth, "bytes/s")

    A save that torch made itself has none; `fastserial.summary()` counts it and says why.
    """
    return _last_save


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Report):
    """One finished load.

        fastserial.load("ckpt.pt")
        report = fastserial.last_load_report()
        print(report.bytes, report.seconds, report.fallback)

    Attributes:
        container: `zip`, `legacy` or `safetensors`.
        bytes: bytes read ahead of or instead of torch; 0 if torch read all.
        engine: `torch` if it read the file itself.
        direct_bytes, cached_bytes: how many of `bytes` came directly from the disk and through
            the page cache.
        verified: every record that was read has the CRC-32 that its file gives.
        phases: `directory`, `wait` (the unpickler waited for bytes).
        ranks: of a load of many ranks, each rank's part; then `bytes` are those of all together,
            without the index of the file.
        missing_keys: of a load of many ranks with `strict=False`, what this rank wanted and the
            file lacks; unchanged.
        unexpected_keys: likewise, what the file holds and no rank wanted.
    """

    direct_bytes: int = 0
    cached_bytes: int = 0
    verified: bool = False
    ranks: tuple[RankReport, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        left_out = [
            f"{what}: {_listed(keys)}"
            for what, keys in (
                ("not in the file, unchanged", self.missing_keys),
                ("only in the file", self.unexpected_keys),
            )
            if keys
        ]
        return "\n  ".join([self._summary(), *left_out, *map(str, self.ranks)])

    def _summary(self) -> str:
        if not self.bytes:  # no speed to report
            who = "by torch itself" if self.engine == "torch" else "no tensor's bytes"
            return self._with_file(f"READ: {who}, run={self.seconds * 1000:.0f}msec")
        direct, cached = format_bytes(self.direct_bytes), format_bytes(self.cached_bytes)
        details = f"direct={direct}, cached={cached}, verified={int(self.verified)}"
        return self.line("READ", details)


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


_last_load: LoadReport | None = None


def publish_load(report: LoadReport, on_load: Callable[[LoadReport], None] | None) -> None:
    """Make a report the process's last one, and pass it to `on_load`."""
    global _last_load
    _last_load = report
    if report.engine == "torch":
        LOADS.add_torchs(report.fallback)
    else:
        LOADS.add(report.bytes, report.seconds, report.fallback)
    _log.debug("%s", report)
    _notify(report, on_load, "on_load")


def last_load_report() -> LoadReport | None:
    """Return the report of the load that finished last in this process, or None.

        torch.load("ckpt.pt")
        print(fastserial.last_load_report())

    A `BytesIO`, from which torch also unpickles tensors, makes one only with `verify_on_load`.
    """
    return _last_load


_OTHERS = "other reasons"


class Counts:
    """What the saves, or the loads, of this process did: for `fastserial.summary()`.

    Attributes:
        count: how many there were.
        nbytes: bytes moved by fastserial.
        seconds: that these bytes took together, `save_async` included.
        by_torch: how many torch did itself.
        reasons: why, and how many for each; None: not known.
        slower: why fastserial was not at its fastest, and how many for each.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._lock = threading.RLock()  # a signal handler may save, too
        self.count = 0
        self.nbytes = 0
        self.seconds = 0.0
        self.by_torch = 0
        self.reasons: dict[str | None, int] = {}
        self.slower: dict[str | None, int] = {}

    def add(self, nbytes: int, seconds: float, reason: str | None) -> None:
        """Count one that fastserial did; `reason`: why it was not the fastest, or None."""
        with Locked(self._lock):
            self.count += 1
            self.nbytes += nbytes
            self.seconds += seconds
            if reason is not None:
                _count(self.slower, reason)

    def add_torchs(self, reason: str | None) -> None:
        """Count one that torch did."""
        with Locked(self._lock):
            self.count += 1
            self.by_torch += 1
            _count(self.reasons, reason)


def _count(counts: dict[str | None, int], reason: str | None) -> None:
    if reason not in counts and len(counts) >= _MOST:
        reason = _OTHERS
    counts[reason] = counts.get(reason, 0) + 1


SAVES = Counts()
LOADS = Counts()


def _in_child() -> None:
    SAVES.clear()
    LOADS.clear()


os.register_at_fork(after_in_child=_in_child)
