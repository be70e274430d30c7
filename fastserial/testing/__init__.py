"""Conformance suites for what others may add to fastserial. Needs pytest.

An engine passes when a subclass of `EngineTests` does:

    class TestMine(EngineTests):
        @pytest.fixture
        def engine(self) -> Iterator[Engine]:
            engine = MyEngine(threads=2)
            yield engine
            engine.close()
"""

from __future__ import annotations

from fastserial.testing.engines import EngineTests
from fastserial.testing.transfers import BLOCK, drive, read, write

__all__ = ["BLOCK", "EngineTests", "drive", "read", "write"]
