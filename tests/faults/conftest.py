"""Faults: short, seeded runs by default; with `FASTSERIAL_FAULTS=full` those of the docs.

Each proof counts its trials; one table of all counts is printed at the end, and written to
`FASTSERIAL_FAULTS_TABLE` if that names a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounts import Lab, own_mounts
from proofs import Proof
from support.forms import FULL
from victims import Zygote

_proofs: dict[str, Proof] = {}


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Iterator[Proof]:
    """Counts under the name that the test is marked with: `@pytest.mark.proof("...")`."""
    marker = request.node.get_closest_marker("proof")
    assert marker is not None, "mark the test with the name of its row"
    made = Proof(marker.args[0])
    yield made
    # Properties of a test reach the process that prints, also when several run tests.
    request.node.user_properties.append(("proof", (made.name, made.trials, dict(made.outcomes))))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for kind, counts in report.user_properties:
            if kind == "proof":
                name, trials, outcomes = counts
                row = _proofs.setdefault(name, Proof(name))
                row.trials += trials
                row.outcomes.update(outcomes)


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


def _rows() -> list[tuple[str, str, str]]:
    return [
        (p.name, str(p.trials), ", ".join(f"{n} {what}" for what, n in sorted(p.outcomes.items())))
        for p in _proofs.values()
        if p.trials
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [("proof", "trials", "outcomes"), *_rows()]
    if len(rows) == 1:
        return
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    terminalreporter.section(f"faults ({'full' if FULL else 'short'} run)")
    for name, count, outcomes in rows:
        terminalreporter.write_line(f"{name:{widths[0]}}  {count:>{widths[1]}}  {outcomes}")
    place = os.environ.get("FASTSERIAL_FAULTS_TABLE")
    if place:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|---|---:|---|")
        Path(place).write_text("\n".join(lines) + "\n", encoding="utf-8")
