"""Which form of a test runs: the short one, or with `FASTSERIAL_FAULTS=full` the long one."""

from __future__ import annotations

import os
import random

import pytest

FULL = os.environ.get("FASTSERIAL_FAULTS", "") == "full"
_SEED = os.environ.get("FASTSERIAL_FAULTS_SEED", "20261121")


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> int:
    """How many: `@pytest.mark.trials(short, full)`."""
    short, full = request.node.get_closest_marker("trials").args
    return int(full if FULL else short)


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers, the same in every run with the same `FASTSERIAL_FAULTS_SEED`."""
    return random.Random(f"{_SEED} {request.node.name}")
