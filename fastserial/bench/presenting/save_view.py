"""Results for people: tables, and one line per row in fio's format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastserial.bench.measuring.machine import Place
from fastserial.bench.measuring.summary import Line, Spread, unsteadiness
from fastserial.bench.measuring.units import MB
from fastserial.bench.studies.comparison import FIO, Comparison
from fastserial.bench.studies.save import SaveResult
from fastserial.bench.studies.small import SmallCase
from fastserial.bench.studies.startup import Startup
from fastserial.reports import format_bandwidth, format_bytes

__all__ = [
    "UNKNOWN",
    "caption",
    "fio_line",
    "format_ratio",
    "format_spread",
    "grouped_table",
    "show_comparison",
    "show_head",
    "show_lines",
    "show_save",
    "table_of",
]

UNKNOWN = "–"
_PAGES = (
    "[yellow]fio ran on ordinary pages, fastserial on huge ones: only the rows “small pages” "
    "compare like with like, and a ratio above 1 does not mean faster than the device. For fio on "
    "huge pages: sysctl vm.nr_hugepages=64, and back to what it was afterwards.[/yellow]"
)


def show_save(result: SaveResult, console: Console, lines: bool = False) -> None:
    """Print the result of `bench save`, with `lines` also one line per row in fio's format."""
    show_comparison(result.comparison, console, lines)
    for case in result.small:
        console.print(_small_table(case))
    if result.startup is not None:
        console.print(_startup(result.startup), soft_wrap=True)


def show_comparison(found: Comparison, console: Console, lines: bool = False) -> None:
    """Print where, what and how fast, what is missing, and whether to quote it."""
    show_head(caption(found), found.place, found.missing, console)
    console.print(grouped_table("", found.lines, "extra memory", "checked", _checked))
    if (factor := unsteadiness(found.lines)) is not None:
        console.print(
            f"[red]Do not quote this run: the durable rows varied {factor:.1f}-fold (median), so "
            "the disk or the machine was busy with other things.[/red]",
            soft_wrap=True,
        )
    if found.fio_small_pages:
        console.print(_PAGES, soft_wrap=True)
    if lines:
        show_lines(found.lines, console)


def caption(found: Comparison) -> str:
    """Return where and what was measured, and how, in three lines."""
    return (
        f"{found.place}\n{found.data}; medians of {found.runs} "
        "interleaved runs (least–greatest); ratios are of runs of the same round"
    )


def show_head(text: str, place: Place, missing: Mapping[str, str], console: Console) -> None:
    """Print what stands above a table.

    Args:
        text: where and what was measured.
        missing: which rows are not there, why, and how to get them; fio is shown first.
    """
    for line in text.split("\n"):
        console.print(line, markup=False, soft_wrap=True)
    options = ", ".join(f"{name}={value}" for name, value in place.options.items())
    console.print(f"fastserial: {options}", markup=False, soft_wrap=True)
    for name, why in sorted(missing.items(), key=lambda item: not item[0].startswith(FIO)):
        console.print(f"without {escape(name)}: {escape(why)}", soft_wrap=True)


def show_lines(lines: Sequence[Line], console: Console, direction: str = "WRITE") -> None:
    """Print one line per row in fio's format."""
    for line in lines:
        console.print(escape(fio_line(line, direction)), soft_wrap=True)


def fio_line(line: Line, direction: str = "WRITE") -> str:
    """Return a row's result as fio writes it, with its ratios; `direction` is `WRITE` or `READ`."""
    spread, parts = line.bandwidth, []
    parts.append(f"bw={format_bandwidth(spread.median)}")
    parts.append(f"{format_bandwidth(spread.low)}-{format_bandwidth(spread.high)}")
    parts.append(f"io={format_bytes(line.nbytes)}")
    parts.append(f"run={line.seconds.median * 1000:.0f}msec")
    if line.latency is not None and line.latency.count:
        points = (line.latency.p50, line.latency.p95, line.latency.p99)
        parts.append(f"lat p50/p95/p99={'/'.join(f'{p * 1000:.2f}' for p in points)}msec")
    for name, ratio in (("fio", line.to_fio), ("stock", line.to_stock)):
        if ratio is not None:
            parts.append(f"{name}={ratio.median:.2f}x")
    if line.fallback:
        parts.append(f"fallback={line.fallback}")
    return f"{line.name}: {direction}: {', '.join(parts)}"


def format_ratio(spread: Spread | None) -> str:
    """Return a ratio with its range."""
    return UNKNOWN if spread is None else format_spread(spread, 1.0, 2)


def table_of(*columns: str, title: str | None = None) -> Table:
    """Return a table with all columns but the first aligned right."""
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns:
        column.overflow = "fold"  # a number that is cut off is another number
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def grouped_table(
    title: str, lines: Sequence[Line], memory: str, last: str, checked: Callable[[Line], str]
) -> Table:
    """Return a table of rows, group by group; `memory` and `last` are heads of columns."""
    table = table_of(title, "MB/s", "× fio", "× stock", "CPU s/GB", memory, last)
    for group in dict.fromkeys(line.group for line in lines):
        table.add_section()
        table.add_row(f"[bold]{group}[/bold]")
        for line in lines:
            if line.group == group:
                table.add_row(*_cells(line), checked(line))
    return table


def format_spread(spread: Spread, unit: float = 1.0, digits: int = 0) -> str:
    """Return a median with its range, in units of `unit`."""
    low, middle, high = (
        f"{value / unit:,.{digits}f}" for value in (spread.low, spread.median, spread.high)
    )
    return f"{middle} ({low}–{high})"


def _cells(line: Line) -> Iterator[str]:
    yield f"  {line.name}"
    yield format_spread(line.bandwidth, MB)
    yield format_ratio(line.to_fio)
    yield format_ratio(line.to_stock)
    yield f"{line.cpu_per_gb.median:.2f}"
    yield UNKNOWN if line.extra_bytes is None else f"{line.extra_bytes / 2**20:.0f}MiB"


def _checked(line: Line) -> str:
    if not line.right:
        return "[red]WRONG[/red]"
    if line.identical:
        return "stock's bytes"
    return "read back" if line.equal else UNKNOWN


def _small_table(case: SmallCase) -> Table:
    table = table_of(case.name, "msec", "time ÷ stock", "checked")
    for line in case.lines:
        ratio = line.to_stock
        inverse = ratio and Spread(1 / ratio.median, 1 / ratio.high, 1 / ratio.low)
        table.add_row(
            line.name,
            format_spread(line.seconds, 1e-3, 2),
            format_ratio(inverse),
            _checked(line),
        )
    return table


def _startup(startup: Startup) -> str:
    return (
        f"import fastserial + install(): {startup.added.median * 1e3:.0f} ms more than "
        f"import torch ({startup.torch.median * 1e3:.0f} ms): × {startup.ratio.median:.3f}"
    )
