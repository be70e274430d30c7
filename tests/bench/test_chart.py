"""The chart of the README, from a file of results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "benchmarks" / "results" / "chart.py"


def test_the_chart_of_the_readme(tmp_path: Path) -> None:
    source, target = sorted(CHART.parent.glob("*.json"))[-1], tmp_path / "chart.svg"
    subprocess.run([sys.executable, CHART, source, target], check=True)
    ElementTree.fromstring(target.read_text())
