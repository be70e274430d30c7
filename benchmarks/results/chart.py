"""Draw the chart of the README from a file of results: durable saves, and cold loads.

`python benchmarks/results/chart.py RESULTS.json chart.svg`. RESULTS.json has, for each script of
benchmarks/, what its `--json` has; the chart takes `torch_save_model` and `load`. Each bar is a
median, the line on it goes from the least to the greatest run; the number is the median in GB/s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, BAR, GAP, LABEL, VALUE = 820, 16, 8, 250, 60
OURS = "fastserial"


@dataclass(frozen=True)
class Panel:
    """What one half of the chart shows.

    Attributes:
        script: the key in the file of results.
        title: above the bars.
        group: of the rows that are compared.
        bars: what a bar is called, and how the names of its rows begin; of several rows the
            fastest is taken.
        without: words in the names of rows that are never taken.
    """

    script: str
    title: str
    group: str
    bars: Mapping[str, str]
    without: Sequence[str] = ("fresh data", "small pages", "huge pages", "engine", "CRC off")


PANELS = (
    Panel(
        "torch_save_model",
        "Durable save",
        "durable",
        {
            "torch.save + fsync": "stock zip",
            "the same, checksums off": "stock zip, CRC off",
            "torch.save, legacy + fsync": "stock legacy",
            "safetensors + fsync": "safetensors",
            "DCP + fsync": "DCP FileSystemWriter",
            "DeepSpeed's writer + fsync": "DeepSpeed's writer, zip",
            OURS: "fastserial zip",
            "the disk (fio)": "fio",
        },
    ),
    Panel(
        "load",
        "Load, nothing in the page cache",
        "cold",
        {
            "torch.load": "stock zip",
            "safetensors": "safetensors, touched",
            "safetensors, cloned": "safetensors + clone",
            "DCP": "DCP FileSystemReader",
            OURS: "fastserial zip",
            "the disk (fio)": "fio",
        },
        ("small pages", "huge pages", "verified", "mmap"),
    ),
)


def values(panel: Panel, result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the spread of each bar in bytes per second; what was not measured is left out."""
    rows = [row for table in result["tables"] for row in table["rows"]]
    found: dict[str, dict[str, float]] = {}
    for label, name in panel.bars.items():
        spreads = [
            row["bytes_per_second"]
            for row in rows
            if row.get("group") == panel.group
            and row["name"].startswith(name)
            and not any(word in row["name"] and word not in name for word in panel.without)
            and row.get("bytes_per_second")
        ]
        if spreads:
            found[label] = max(spreads, key=lambda spread: float(spread["median"]))
    return found


def draw(results: Mapping[str, Any]) -> str:
    """Return the chart as SVG.

    Raises:
        KeyError: a script of the chart is not in the results.
    """
    parts: list[str] = []
    top = 0
    for panel in PANELS:
        result = results[panel.script]
        top = _panel(parts, top, panel, values(panel, result), result)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
        'font-family="sans-serif" font-size="13">'
    )
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>', *parts, "</svg>"]
    )


def _panel(
    parts: list[str],
    top: int,
    panel: Panel,
    found: Mapping[str, Mapping[str, float]],
    result: Mapping[str, Any],
) -> int:
    """Add a title, a bar for each value and where they come from; return where the next begins."""
    scale = (WIDTH - LABEL - VALUE) / max(spread["high"] for spread in found.values())
    title = f"{panel.title}, GB/s: {result['settings']['subject']}"
    parts.append(_text(10, top + 24, title, "bold"))
    top += 38
    for label, spread in found.items():
        ours, middle = label == OURS, top + BAR / 2
        low, median, high = (spread[key] * scale + LABEL for key in ("low", "median", "high"))
        color = "#d9480f" if ours else "#adb5bd"
        parts.append(_text(LABEL - 8, middle + 5, label, "bold" if ours else "normal", "end"))
        parts.append(
            f'<rect x="{LABEL}" y="{top}" width="{median - LABEL:.1f}" height="{BAR}" '
            f'fill="{color}"/>'
        )
        parts.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="#212529"/>'
        )
        parts.append(_text(WIDTH - 10, middle + 5, f"{spread['median'] / 1e9:.2f}", anchor="end"))
        top += BAR + GAP
    machine = result["machine"]
    source = (
        f"{result['command']}, {result['time'][:10]}, {machine['cpu']}, {machine['cores']} cores; "
        f"bar: median of {result['settings']['runs']} runs, line: least to greatest"
    )
    parts.append(_text(10, top + 12, source, size=10))
    return top + 24


def _text(
    x: float, y: float, text: str, weight: str = "normal", anchor: str = "start", size: int = 13
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}" '
        f'font-size="{size}">{escape(text)}</text>'
    )


def main() -> None:
    """Read a file of results, and write the chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="benchmarks/results/DATE-MACHINE.json")
    parser.add_argument("chart", type=Path, help="the SVG to write")
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8"))
    options.chart.write_text(draw(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
