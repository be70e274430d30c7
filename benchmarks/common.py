"""What the scripts in this folder share: their options, what they print and write, plots."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastserial.bench.measure import BenchError, parse_bytes
from fastserial.bench.table import Result, Spread, Table, check_files
from fastserial.console import say
from fastserial.errors import FastserialError
from fastserial.progress import show_line

__all__ = ["Picture", "Say", "Script", "size"]

Say = Callable[[str], None]
_DPI = 130


def size(text: str) -> int:
    """Return the bytes of `3GiB`, `3GB` or `4096`, for argparse."""
    try:
        return parse_bytes(text)
    except FastserialError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Picture:
    """What `--plot` draws: bars, or lines if there is an `x`.

    Attributes:
        y: key of the values, with their range where they are spreads.
        label: what it is, with its unit.
        unit: the values are divided by it.
        x: key of the horizontal axis.
        by: keys that tell lines apart.
        log: both axes are logarithmic.
    """

    y: str = "bytes_per_second"
    label: str = "GB/s (10⁹ bytes per second)"
    unit: float = 1e9
    x: str | None = None
    by: tuple[str, ...] = ("name",)
    log: bool = False


class Script:
    """A benchmark that is run as `python benchmarks/NAME.py --folder D`.

    Example:
        `Script(__doc__, "three minutes", {"runs": 1}).run(measure)`
    """

    def __init__(
        self,
        description: str | None,
        takes: str,
        short: Mapping[str, Any],
        picture: Picture | None = None,
    ) -> None:
        """Make it, with the options that all scripts have.

        Args:
            description: of what is measured.
            takes: how long the full form takes on two cores, about.
            short: values of options in the short form.
            picture: what is drawn of the tables.
        """
        description = f"{description} The full form takes about {takes} on 2 cores."
        self.parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._takes, self._short, self._picture = takes, short, picture or Picture()
        self.add("--folder", type=Path, required=True, help="where to write; its disk is measured")
        self.add("--runs", type=int, help="rounds that count, after a warm-up", default=3)
        short_help = f"ends within two minutes: {', '.join(f'{k}={v}' for k, v in short.items())}"
        self.add("--short", action="store_true", help=short_help)
        pause = "seconds of rest before each run, when no page is dirty; 0: nothing is waited for"
        self.add("--pause", type=float, default=0.3, help=pause)
        self.add("--json", type=Path, metavar="FILE", help="also write everything here")
        self.add(
            "--csv", type=Path, metavar="FILE", help="also write the rows; ranges: the medians"
        )
        self.add("--plot", type=Path, metavar="FILE", help="also draw them (.png, .svg, .pdf)")

    def add(self, name: str, **settings: Any) -> None:
        """Add an option, as `ArgumentParser.add_argument` does; its help shows the default."""
        value = settings.get("default")
        if value is not None and settings.get("action") is None:
            settings["help"] = f"{settings.get('help', '')} (default: {value})".strip()
        self.parser.add_argument(name, **settings)

    def run(self, measure: Callable[[argparse.Namespace, Say], Result]) -> None:
        """Measure, show and write what was found; ends the process.

        Exit status 1: something that was written or read is wrong; 2: it cannot be measured.
        """
        if "--short" in sys.argv:
            self.parser.set_defaults(**self._short)
        options = self.parser.parse_args()
        try:
            check_files(options.json, options.csv, options.plot)
            if options.plot is not None:
                _new_figure(1, 1)
            if not options.short:
                say(f"about {self._takes}; --short ends within two minutes", err=True)
            result = measure(options, show_line)
            result.show()
            result.write(options.json)
            if options.csv is not None:
                write_csv(result, options.csv)
            if options.plot is not None:
                draw(result, self._picture, options.plot)
        except (FastserialError, OSError) as error:
            say(f"error: {error}", err=True)
            raise SystemExit(2) from None
        raise SystemExit(0 if result.right else 1)


def write_csv(result: Result, path: Path) -> None:
    """Write the rows of all tables, each with the title of its table; of a range the median.

    Raises:
        OSError: it cannot be written.
    """
    rows = [
        {
            "table": table.title,
            **{key: one.median if isinstance(one, Spread) else one for key, one in row.items()},
        }
        for table in result.tables
        for row in table.rows
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# -- plots ---------------------------------------------------------------------------------------


def draw(result: Result, picture: Picture, path: Path) -> None:
    """Draw the tables of a result, one below the other.

    Raises:
        BenchError: matplotlib is missing, or cannot write such a file.
    """
    tables = [table for table in result.tables if any(picture.y in row for row in table.rows)]
    bars = max((len(table.rows) for table in tables), default=0)
    high = 4.5 if picture.x is not None else 1 + 0.32 * bars
    figure = _new_figure(11, 1.5 + high * max(1, len(tables)))
    figure.suptitle("\n".join([result.benchmark, *result.where()]), fontsize=8, wrap=True)
    for index, table in enumerate(tables, 1):
        axes = figure.add_subplot(len(tables), 1, index)
        axes.set_title(table.title, fontsize=9, loc="left")
        (_bars if picture.x is None else _lines)(axes, table, picture)
    try:
        figure.savefig(path, dpi=_DPI)
    except ValueError as error:
        raise BenchError(f"{path}: {error}") from error


def _bars(axes: Any, table: Table, picture: Picture) -> None:
    rows = [row for row in table.rows if row.get(picture.y) is not None]
    middles, errors = _points([row[picture.y] for row in rows], picture.unit)
    axes.barh([str(row["name"]) for row in rows], middles, xerr=errors, capsize=2)
    axes.invert_yaxis()
    axes.set_xlabel(picture.label)


def _lines(axes: Any, table: Table, picture: Picture) -> None:
    x = picture.x or "name"
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in table.rows:
        if row.get(picture.y) is not None:
            name = ", ".join(str(row[key]) for key in picture.by)
            found.setdefault(name, []).append(row)
    for name, rows in found.items():
        rows.sort(key=lambda row: row[x])
        middles, errors = _points([row[picture.y] for row in rows], picture.unit)
        places = [row[x] for row in rows]
        axes.errorbar(places, middles, yerr=errors, marker="o", capsize=2, label=name)
    if picture.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(picture.label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)


def _points(values: Sequence[Any], unit: float) -> tuple[list[float], list[list[float]]]:
    """Return the middles, and how far the least and the greatest are below and above them."""
    spreads = [one if isinstance(one, Spread) else Spread(one, one, one) for one in values]
    below = [(one.median - one.low) / unit for one in spreads]
    above = [(one.high - one.median) / unit for one in spreads]
    return [one.median / unit for one in spreads], [below, above]


def _new_figure(width: float, height: float) -> Any:
    """Return an empty figure, its size in inches.

    Raises:
        BenchError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")
