"""What a load did, in fio's words."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fastserial.config import Config
from fastserial.report import Report, format_bytes

__all__ = ["LoadReport", "last_load_report", "publish_load"]

_log = logging.getLogger("fastserial")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Report):
    """One finished load.

    Attributes:
        container: `zip`, `legacy` or `safetensors`.
        bytes: bytes read ahead of or instead of torch; 0 if torch read all.
        engine: `torch` if it read the file itself.
        direct_bytes, cached_bytes: how many of `bytes` came directly from the disk and through
            the page cache.
        verified: every record that was read has the CRC-32 its file tells.
        phases: `directory`, `wait` (the unpickler waited for bytes).
    """

    direct_bytes: int = 0
    cached_bytes: int = 0
    verified: bool = False

    def __str__(self) -> str:
        if not self.bytes:  # nothing of which to tell a speed
            who = "by torch itself" if self.engine == "torch" else "no tensor's bytes"
            return self._with_file(f"READ: {who}, run={self.seconds * 1000:.0f}msec")
        direct, cached = format_bytes(self.direct_bytes), format_bytes(self.cached_bytes)
        details = f"direct={direct}, cached={cached}, verified={int(self.verified)}"
        return self.line("READ", details)


_last: LoadReport | None = None


def publish_load(report: LoadReport, config: Config) -> None:
    """Make a report the process's last one, and hand it to `on_load`."""
    global _last
    _last = report
    _log.debug("%s", report)
    if config.on_load is not None:
        try:
            config.on_load(report)
        except Exception:  # the object is there: this must not look like a failed load
            _log.exception("on_load failed for %r", report.path)


def last_load_report() -> LoadReport | None:
    """Return the report of the load that finished last in this process, or None.

    A `BytesIO`, from which torch also unpickles tensors, makes one only with `verify_on_load`.
    """
    return _last
