"""Every engine passes the conformance suite; what only one of them does is tested beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastserial import engines
from fastserial.engines import Engine
from fastserial.engines.deepspeed import DeepSpeedEngine
from fastserial.engines.null import NullEngine
from fastserial.engines.threads import ThreadsEngine
from fastserial.testing import EngineTests


class TestThreads(EngineTests):
    @pytest.fixture(params=[(1, True), (4, True), (1, False), (4, False)], ids=str)
    def engine(self, request: pytest.FixtureRequest) -> Iterator[Engine]:
        engine = ThreadsEngine(*request.param)
        yield engine
        engine.close()


class TestNull(EngineTests):
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        engine = NullEngine()
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


def test_survey_names_every_engine() -> None:
    """`doctor` shows each engine, with what it lacks."""
    found = {status.name: status for status in engines.survey()}
    assert {"threads", "null", "deepspeed"} <= set(found)
    assert found["threads"].missing is None
    for status in found.values():
        assert (status.missing is None) == (status.capabilities is not None)
