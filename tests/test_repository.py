"""What the files around the package say of each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="not in a clone")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_pre_commit_has_the_linter_of_the_session() -> None:
    (pinned,) = re.findall(r'"ruff==([\d.]+)"', read("pyproject.toml"))
    assert f"rev: v{pinned}\n" in read(".pre-commit-config.yaml")


def test_workflows_and_ci_call_sessions_that_there_are() -> None:
    there = set(re.findall(r"^def (\w+)\(session", read("noxfile.py"), re.MULTILINE))
    called = set(re.findall(r'session: "?([a-z_]+)', read(".github/workflows/ci.yml")))
    (weekly,) = re.findall(r"session: \[(.+)\]", read(".github/workflows/weekly.yml"))
    called |= set(weekly.split(", "))
    called |= set(re.findall(r'nox -s "?([a-z_]+)', read(".ci/run") + read("CONTRIBUTING.md")))
    assert called <= there, called - there
    assert {"tests", "lint", "python", "docs", "package"} <= called
