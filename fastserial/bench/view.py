"""Results for people: tables, and one line per row in fio's manner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastserial.bench.machine import describe_folder
from fastserial.bench.save import SaveResult
from fastserial.bench.small import SmallCase
from fastserial.bench.startup import Startup
from fastserial.bench.summary import Line, Spread, unsteadiness
from fastserial.bench.units import MB
from fastserial.report import format_bandwidth, format_bytes

__all__ = ["fio_line", "show_save"]

_UNKNOWN = "–"
_PAGES = (
    "[yellow]fio ran on ordinary pages, fastserial on huge ones: only the rows “small pages” "
    "compare like with like, and a ratio above 1 does not mean faster than the device. For fio on "
    "huge pages: sysctl vm.nr_hugepages=64, and back to what it was afterwards.[/yellow]"
)


def show_save(result: SaveResult, console: Console) -> None:
    """Print the result of `bench save`."""
    console.print(escape(str(result.machine)), soft_wrap=True)
    console.print(escape(describe_folder(result.folder)), soft_wrap=True)
    options = ", ".join(f"{name}={value}" for name, value in result.options.items())
    console.print(f"fastserial: {escape(options)}", soft_wrap=True)
    console.print(
        f"{result.bench.tensors} tensors, {format_bytes(result.bench.nbytes)}; medians of "
        f"{result.bench.runs} interleaved runs (least–greatest); ratios are of runs of the same "
        "round",
        soft_wrap=True,
    )
    if result.fio_missing:
        console.print(f"without fio: {escape(result.fio_missing)}", soft_wrap=True)
    console.print(_table(result.lines))
    if (factor := unsteadiness(result.lines)) is not None:
        console.print(
            f"[red]Do not quote this run: the durable rows varied {factor:.1f}-fold (median), so "
            "the disk or the machine was busy with other things.[/red]",
            soft_wrap=True,
        )
    if result.fio_small_pages:
        console.print(_PAGES, soft_wrap=True)
    for line in result.lines:
        console.print(escape(fio_line(line)), soft_wrap=True)
    for case in result.small:
        console.print(_small_table(case))
    if result.startup is not None:
        console.print(_startup(result.startup), soft_wrap=True)


def fio_line(line: Line) -> str:
    """Return a row's result as fio writes it, with its ratios."""
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
    return f"{line.name}: WRITE: {', '.join(parts)}"


def _table(lines: Sequence[Line]) -> Table:
    table = Table("", "MB/s", "× fio", "× stock", "CPU s/GB", "extra memory", "identical")
    for column in table.columns[1:]:
        column.justify = "right"
    for group in dict.fromkeys(line.group for line in lines):
        table.add_section()
        table.add_row(f"[bold]{group}[/bold]")
        for line in lines:
            if line.group == group:
                table.add_row(*_cells(line))
    return table


def _cells(line: Line) -> Iterator[str]:
    yield f"  {line.name}"
    spread = line.bandwidth
    yield f"{spread.median / MB:,.0f} ({spread.low / MB:,.0f}–{spread.high / MB:,.0f})"
    yield _ratio(line.to_fio)
    yield _ratio(line.to_stock)
    yield f"{line.cpu_per_gb.median:.2f}"
    yield _UNKNOWN if line.extra_bytes is None else f"{line.extra_bytes / 2**20:.0f}MiB"
    yield {None: _UNKNOWN, True: "yes", False: "[red]NO[/red]"}[line.identical]


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return _UNKNOWN
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def _small_table(case: SmallCase) -> Table:
    table = Table(case.name, "msec", "time ÷ stock", "identical")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in case.lines:
        times, ratio = line.seconds, line.to_stock
        inverse = ratio and Spread(1 / ratio.median, 1 / ratio.high, 1 / ratio.low)
        table.add_row(
            line.name,
            f"{times.median * 1e3:.2f} ({times.low * 1e3:.2f}–{times.high * 1e3:.2f})",
            _ratio(inverse),
            {None: _UNKNOWN, True: "yes", False: "[red]NO[/red]"}[line.identical],
        )
    return table


def _startup(startup: Startup) -> str:
    return (
        f"import fastserial + install(): {startup.added.median * 1e3:.0f} ms more than "
        f"import torch ({startup.torch.median * 1e3:.0f} ms): × {startup.ratio.median:.3f}"
    )
