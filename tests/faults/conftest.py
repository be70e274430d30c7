"""Faults: short, seeded runs by default; with `FASTSERIAL_FAULTS=full` those of the docs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounts import Lab, own_mounts
from victims import Zygote


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """What the trials of a test came to: printed as a row, and added to the table of the docs."""
    found: Counter[str] = Counter()
    yield found
    outcomes = ", ".join(f"{number} {what}" for what, number in sorted(found.items()))
    row = f"| {request.node.name} | {found.total()} | {outcomes} |\n"
    print(row)
    if place := os.environ.get("FASTSERIAL_FAULTS_TABLE"):
        with open(place, "a", encoding="utf-8") as table:
            table.write(row)


@pytest.fixture(scope="session")
def _mounts() -> None:
    own_mounts()


@pytest.fixture
def lab(tmp_path: Path, _mounts: None) -> Iterator[Lab]:
    """Makes file systems, and takes all of them down at the end."""
    with Lab(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def zygote(_mounts: None) -> Iterator[Zygote]:
    """Starts processes that save, without importing torch each time."""
    with Zygote() as made:
        yield made
