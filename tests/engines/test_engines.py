"""Every engine passes the conformance suite; what only one of them does is tested beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engine_tests import EngineTests

from fastserial.engines import Engine
from fastserial.engines.deepspeed.engine import DeepSpeedEngine
from fastserial.engines.io_uring import IoUringEngine
from fastserial.engines.threads import ThreadsEngine
from fastserial.interrupts import Background


class TestThreads(EngineTests):
    @pytest.fixture(params=[(1, True), (4, True), (1, False), (4, False)], ids=str)
    def engine(self, request: pytest.FixtureRequest) -> Iterator[Engine]:
        engine = ThreadsEngine(*request.param)
        yield engine
        engine.close()


class TestThreadsWithFew(EngineTests):
    """A limit on threads, or an interpreter that is shutting down: those there are do it all."""

    @pytest.fixture(params=[(0, True), (0, False), (1, True), (1, False)], ids=str)
    def engine(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Engine]:
        allowed, prepare_here = request.param
        real = Background.start

        def start(threads: Background, *arguments: Any) -> bool:
            return len(threads) < allowed and real(threads, *arguments)

        monkeypatch.setattr(Background, "start", start)
        engine = ThreadsEngine(4, prepare_here)
        yield engine
        engine.close()


class TestIoUring(EngineTests):
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        missing = IoUringEngine.unavailable()
        if missing is not None:
            pytest.skip(missing)
        engine = IoUringEngine()
        yield engine
        engine.close()


class TestDeepSpeed(EngineTests):
    @pytest.fixture(params=[1, 4])
    def engine(self, request: pytest.FixtureRequest) -> Iterator[Engine]:
        missing = DeepSpeedEngine.unavailable()
        if missing is not None:
            pytest.skip(missing)
        engine = DeepSpeedEngine(request.param)
        yield engine
        engine.close()
