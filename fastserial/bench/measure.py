"""One timed call: wall clock, processor time, peak of extra memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastserial.config import parse_size
from fastserial.errors import ConfigError, FastserialError

MB, GB = 1000**2, 1000**3
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


class BenchError(FastserialError, RuntimeError):
    """A benchmark cannot run here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one timed call took, or one transfer.

    Attributes:
        nbytes: that it moved; 0 if unknown.
        seconds: wall clock.
        cpu_seconds: processor time of all threads of this process, user and system.
        extra_bytes: peak of resident memory above what was resident before; None where the
            kernel does not let us reset the peak.
        fallback: why the transfer was slower than possible, or None.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    extra_bytes: int | None = None
    fallback: str | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


def measure(call: Callable[[], object]) -> Sample:
    """Run a call once and return what it took: `measure(lambda: torch.save(state, path))`."""
    gc.collect()  # so that no call pays for the garbage of another
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)  # so that no call reuses the pages of another
    before = _reset_peak()
    cpu = time.process_time()
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    extra = None if before is None else max(0, _peak_bytes() - before)
    return Sample(0, seconds, cpu, extra)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size above 0, as `fastserial.config.parse_size`.

    Raises:
        ConfigError: it is not a size, or not a positive one.
    """
    nbytes = parse_size(text)
    if nbytes <= 0:
        raise ConfigError(f"expected a size above 0, not {text!r}")
    return nbytes


def _reset_peak() -> int | None:
    """Make the peak of resident memory the present value, and return it."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return _peak_bytes()
    except OSError:
        return None


def _peak_bytes() -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise OSError("the kernel reports no peak of resident memory")
