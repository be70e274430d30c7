"""The chart of the README, from a file of results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

CHART = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "chart.py"


def _row(name: str, group: str, median: float) -> dict[str, Any]:
    spread = {"low": median * 0.9, "median": median, "high": median * 1.1}
    return {"name": name, "group": group, "bytes_per_second": spread}


def _result(*rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "A & B", "cores": 2}
    common = {"command": "load.py --folder D", "time": "2026-11-24T10:00:00+0000"}
    return {**common, "machine": machine, "tables": [{"title": "", "rows": list(rows)}]}


def test_the_chart_has_the_medians_of_the_rows_it_names(tmp_path: Path) -> None:
    results = {
        "torch_save_model": _result(
            _row("fio libaio 1MiB", "durable", 2.1e9),
            _row("fio io_uring 4MiB", "durable", 2.25e9),
            _row("fio io_uring 4MiB, fresh data", "durable", 9e9),
            _row("stock zip", "durable", 0.4e9),
            _row("stock zip, not durable", "not durable", 8e9),
            _row("fastserial zip", "durable", 2.0e9),
            {"name": "safetensors", "group": "durable", "problem": "not installed"},
        ),
        "load": _result(
            _row("fastserial zip, cold", "cold", 1.5e9), _row("fastserial zip, warm", "warm", 7e9)
        ),
    }
    source, target = tmp_path / "results.json", tmp_path / "chart.svg"
    source.write_text(json.dumps(results))
    subprocess.run([sys.executable, CHART, source, target], check=True)
    text = target.read_text()
    ElementTree.fromstring(text)
    assert re.findall(r">(\d\.\d\d)<", text) == ["0.40", "2.00", "2.25", "1.50"]
    assert "safetensors" not in text
    assert "load.py --folder D, 2026-11-24, A &amp; B, 2 cores" in text
