"""The results of a sweep for people: the best points, and a heat map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.summary import Spread
from fastserial.bench.measuring.units import MB
from fastserial.bench.presenting.plot import new_figure, save_figure
from fastserial.bench.presenting.save_view import format_ratio, format_spread, table_of
from fastserial.bench.studies.sweep import HOST
from fastserial.bench.studies.sweep_file import Point, Result, format_size

__all__ = ["Cell", "best_settings", "cells", "plot", "show_sweep"]

_SHOWN = 8
_GAIN = 1.03  # over the defaults: less is not worth other settings
_INCHES = (0.95, 0.55)  # of a cell of the heat map
_MARGIN = (2.4, 1.6)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point over all its runs: bytes per second, and the ratio to the defaults."""

    point: Point
    bandwidth: Spread
    ratio: Spread
    error: str


def cells(results: Iterable[Result]) -> list[Cell]:
    """Return the points with their medians, the best of each kind of transfer first."""
    by_point: dict[Point, list[Result]] = {}
    for result in results:
        by_point.setdefault(result.point, []).append(result)
    found = [
        Cell(
            point,
            Spread.of(one.bandwidth for one in group),
            Spread.of(one.ratio for one in group),
            next((one.error for one in group if one.error), ""),
        )
        for point, group in by_point.items()
    ]
    found.sort(key=lambda cell: (cell.point.op, cell.point.transfer, -cell.ratio.median))
    return found


def show_sweep(found: Sequence[Cell], console: Console) -> None:
    """Print the best points of each kind of transfer."""
    table = table_of("", "block size", "depth", "threads", "engine", "MB/s", "× defaults")
    for (op, transfer), group in itertools.groupby(
        found, key=lambda cell: (cell.point.op, cell.point.transfer)
    ):
        table.add_section()
        kind = list(group)
        default = Point.of_defaults(op, transfer)
        for index, cell in enumerate(kind):
            point = cell.point
            if index >= _SHOWN and point != default:
                continue
            table.add_row(
                f"{op}, {transfer}" if not index else "",
                format_size(point.block_size),
                str(point.queue_depth),
                str(point.threads),
                escape(point.engine + (" (default)" if point == default else "")),
                format_spread(cell.bandwidth, MB) if not cell.error else escape(cell.error),
                format_ratio(cell.ratio),
            )
    console.print(table)


def best_settings(found: Sequence[Cell]) -> list[str]:
    """Return two lines for each kind of transfer: what was found, and the settings to copy.

    The second line is missing where nothing is clearly faster than the defaults: `_GAIN` in the
    median, and faster in every run. It stands in front of a command:
    `FASTSERIAL_BLOCK_SIZE=4MiB FASTSERIAL_QUEUE_DEPTH=8 ... python train.py`.
    """
    lines = []
    for (op, transfer), group in itertools.groupby(
        found, key=lambda cell: (cell.point.op, cell.point.transfer)
    ):
        faster = (cell for cell in group if cell.ratio.median >= _GAIN and cell.ratio.low > 1)
        best = next(faster, None)
        if best is None:
            lines.append(f"# {op}, {transfer}: no setting is clearly faster than the defaults")
            continue
        lines.append(f"# {op}, {transfer}: {best.ratio.median:.2f} × the defaults")
        lines.append(_variables(best.point))
    return lines


def _variables(point: Point) -> str:
    values = {
        "BLOCK_SIZE": format_size(point.block_size),
        "QUEUE_DEPTH": str(point.queue_depth),
        "THREADS": str(point.threads),
        "ENGINE": point.engine,
    }
    if point.transfer != HOST:
        values["TRANSFER"] = point.transfer
    return " ".join(f"FASTSERIAL_{name}={value}" for name, value in values.items())


def plot(found: Sequence[Cell], path: Path, title: str) -> None:
    """Draw heat maps: block size against queue depth, each with its best number of threads.

    There is one for each kind of transfer and engine, with ratios to the defaults as colours.

    Raises:
        BenchError: there is nothing to plot, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    maps = _maps(found)
    if not maps:
        raise BenchError("there is nothing to plot")
    wide = max(len(one.depths) for one in maps) * _INCHES[0] + _MARGIN[0]
    high = max(len(one.sizes) for one in maps) * _INCHES[1] + _MARGIN[1]
    figure = new_figure(wide, high * len(maps) + 0.5)
    figure.suptitle(title, fontsize=9)
    ratios = [cell.ratio.median for one in maps for cell in one.best.values()]
    reach = max(0.1, *(abs(math.log2(ratio)) for ratio in ratios))
    axes = figure.subplots(len(maps), 1, squeeze=False)[:, 0]
    shown: Any = None
    for axis, one in zip(axes, maps, strict=True):
        shown = _draw(axis, one, reach)
    bar = figure.colorbar(shown, ax=list(axes), shrink=0.8)
    bar.set_label("speed over the defaults, log2")
    save_figure(figure, path)


@dataclass(frozen=True, slots=True)
class _Map:
    """One heat map: the best cell for each block size and queue depth."""

    title: str
    sizes: list[int]
    depths: list[int]
    best: dict[tuple[int, int], Cell]


def _maps(found: Sequence[Cell]) -> list[_Map]:
    maps: list[_Map] = []
    usable = [cell for cell in found if not cell.error and cell.ratio.median > 0]
    for kind in sorted({(c.point.op, c.point.transfer, c.point.engine) for c in usable}):
        best: dict[tuple[int, int], Cell] = {}
        for cell in usable:
            point = cell.point
            if (point.op, point.transfer, point.engine) != kind:
                continue
            where = point.block_size, point.queue_depth
            if where not in best or cell.ratio.median > best[where].ratio.median:
                best[where] = cell
        sizes = sorted({size for size, _ in best})
        depths = sorted({depth for _, depth in best})
        maps.append(_Map(", ".join(kind), sizes, depths, best))
    return maps


def _draw(axis: Any, one: _Map, reach: float) -> Any:
    rows = [
        [
            math.log2(one.best[size, depth].ratio.median) if (size, depth) in one.best else math.nan
            for depth in one.depths
        ]
        for size in one.sizes
    ]
    shown = axis.imshow(rows, cmap="RdYlGn", vmin=-reach, vmax=reach, aspect="auto", origin="lower")
    axis.set_title(one.title, fontsize=9)
    axis.set_xlabel("queue depth", fontsize=8)
    axis.set_ylabel("block size", fontsize=8)
    axis.set_xticks(range(len(one.depths)), [str(depth) for depth in one.depths], fontsize=8)
    axis.set_yticks(range(len(one.sizes)), [format_size(size) for size in one.sizes], fontsize=8)
    for (size, depth), cell in one.best.items():
        text = (
            f"{cell.ratio.median:.2f} ×\n{cell.bandwidth.median / MB:,.0f} MB/s, "
            f"{cell.point.threads} thr."
        )
        where = one.depths.index(depth), one.sizes.index(size)
        axis.text(*where, text, ha="center", va="center", fontsize=6)
    return shown
