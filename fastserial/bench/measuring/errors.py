"""What a benchmark raises on purpose."""

from __future__ import annotations

from fastserial.errors import FastserialError

__all__ = ["BenchError"]


class BenchError(FastserialError, RuntimeError):
    """A benchmark cannot run here; the message says what to do."""
