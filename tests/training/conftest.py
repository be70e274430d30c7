"""Saves beside the program: what the tests of this folder share is in `support.beside`."""

from __future__ import annotations

import pytest
from support.beside import dice, gate, nothing_left, trials  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "trials(short, full): number of trials")
