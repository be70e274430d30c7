"""Results as pictures. matplotlib is imported when one is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.rows import OVERHEAD
from fastserial.bench.measuring.summary import Line, Spread
from fastserial.bench.measuring.units import GB

__all__ = ["check_plot", "new_figure", "plot_lines", "save_figure", "with_errors", "wrapped"]

_CAPTION_WIDTH = 125  # characters
_DPI = 130
_ROW_INCHES = 0.32


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn, before minutes are spent on measuring.

    Raises:
        BenchError: matplotlib is missing, or does not know the format of the file name's suffix.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise BenchError(f"a plot cannot be written as {path.name}: end it in {_listed(known)}")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, its size in inches.

    Raises:
        BenchError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the file name's suffix.

    Raises:
        BenchError: matplotlib does not know that format.
        OSError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DPI)
    except ValueError as error:
        raise BenchError(f"{path}: {error}") from error


def wrapped(text: str) -> str:
    """Return a caption with each of its lines broken where it is too long."""
    return "\n".join(textwrap.fill(line, _CAPTION_WIDTH) for line in text.splitlines())


def plot_lines(path: Path, lines: Sequence[Line], title: str, caption: str) -> None:
    """Draw a bar per row: the median bandwidth, its range, and the ratios.

    Rows that move no bytes to a disk are left out.

    Raises:
        BenchError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    groups = [group for group in dict.fromkeys(line.group for line in lines) if group != OVERHEAD]
    ordered = [line for group in groups for line in lines if line.group == group]
    figure = new_figure(11, 1.8 + _ROW_INCHES * len(ordered))
    axes = figure.subplots()
    for number, group in enumerate(groups):
        rows = [(at, line) for at, line in enumerate(ordered) if line.group == group]
        middles, errors = with_errors([line.bandwidth for _, line in rows])
        axes.barh(
            [at for at, _ in rows],
            middles,
            xerr=errors,
            color=f"C{number}",
            error_kw={"elinewidth": 1, "capsize": 2},
            label=group,
        )
    for at, line in enumerate(ordered):
        place = (line.bandwidth.high / GB, at)
        text = _ratios(line)
        axes.annotate(text, place, (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(ordered)), [line.name for line in ordered])
    axes.invert_yaxis()
    axes.margins(x=0.22, y=0.02)  # room for the ratios
    axes.set_xlim(left=0)
    axes.set_xlabel("GB/s (10⁹ bytes per second): median, least to greatest; ratios are medians")
    axes.set_title(f"{title}\n{wrapped(caption)}", fontsize=9, loc="left")
    axes.legend(fontsize=8)
    save_figure(figure, path)


def with_errors(spreads: Sequence[Spread]) -> tuple[list[float], list[list[float]]]:
    """Return medians in GB/s, and how far the least and the greatest are below and above them."""
    below = [(spread.median - spread.low) / GB for spread in spreads]
    above = [(spread.high - spread.median) / GB for spread in spreads]
    return [spread.median / GB for spread in spreads], [below, above]


def _ratios(line: Line) -> str:
    named = (("fio", line.to_fio), ("stock", line.to_stock))
    return ", ".join(f"{ratio.median:.2f} × {name}" for name, ratio in named if ratio is not None)


def _listed(known: Sequence[str]) -> str:
    return ", ".join(f".{name}" for name in sorted(known))
