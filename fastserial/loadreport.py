"""What a load did, in fio's words."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from fastserial.config import Config
from fastserial.report import Latency, format_bandwidth, format_bytes

__all__ = ["LoadReport", "last_load_report", "publish_load"]

_log = logging.getLogger("fastserial")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One finished load.

    Attributes:
        path: the file, or the name of the file object.
        container: `zip`, `legacy` or `safetensors`.
        bytes: bytes read ahead of or instead of torch; 0 if torch read all.
        seconds: from opening the file to the last byte, unpickling included.
        engine: the engine that moved the bytes; `torch` if it read the file itself.
        direct_bytes, cached_bytes: how many of `bytes` came directly from the disk and through
            the page cache.
        verified: every record that was read has the CRC-32 its file tells.
        fallback: why the load did not go the fastest way, or None.
        block_size, queue_depth, threads: the settings used (bytes, blocks, threads).
        phases: seconds per phase (`directory`, `wait`: the unpickler waited for bytes).
        submit: latency from queueing a block until its read starts.
        complete: latency of the read itself.
    """

    path: str
    container: str
    bytes: int
    seconds: float
    engine: str
    direct_bytes: int = 0
    cached_bytes: int = 0
    verified: bool = False
    fallback: str | None = None
    block_size: int = 0
    queue_depth: int = 0
    threads: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    submit: Latency = field(default_factory=Latency)
    complete: Latency = field(default_factory=Latency)

    @property
    def bandwidth(self) -> float:
        """Bytes per second over the whole load."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values, bandwidth included."""
        return {**asdict(self), "bandwidth": self.bandwidth}

    def __str__(self) -> str:
        line = (
            f"READ: bw={format_bandwidth(self.bandwidth)}, io={format_bytes(self.bytes)}, "
            f"run={self.seconds * 1000:.0f}msec, engine={self.engine}, "
            f"direct={format_bytes(self.direct_bytes)}, cached={format_bytes(self.cached_bytes)}, "
            f"verified={int(self.verified)}, file={self.path}"
        )
        return f"{line}, fallback={self.fallback}" if self.fallback else line


_last: LoadReport | None = None
_lock = threading.Lock()


def publish_load(report: LoadReport, config: Config) -> None:
    """Make a report the process's last one, and hand it to `on_load`."""
    global _last
    with _lock:
        _last = report
    _log.info("%s", report)
    if config.on_load is not None:
        try:
            config.on_load(report)
        except Exception:  # the object is there: this must not look like a failed load
            _log.exception("on_load failed for %s", report.path)


def last_load_report() -> LoadReport | None:
    """Return the report of the load that finished last in this process, or None."""
    return _last
