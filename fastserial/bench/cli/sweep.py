"""`fastserial bench sweep`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fastserial.bench.cli import output
from fastserial.bench.measuring.units import parse_bytes
from fastserial.errors import ConfigError

if TYPE_CHECKING:
    from fastserial.bench.studies.sweep import Grid

__all__ = ["sweep"]

_T = TypeVar("_T")
_SPEED_PERIOD = 600.0  # seconds that the estimate of the time left looks back


def sweep(
    folder: output.Folder,
    size: Annotated[str, typer.Option(help="Size of each transfer.")] = "512MiB",
    runs: Annotated[int, typer.Option(min=1, help="Of every combination.")] = 3,
    block_sizes: Annotated[
        str, typer.Option("--block-size", help="To combine, with commas.")
    ] = "256KiB,1MiB,2MiB,4MiB,8MiB,16MiB",
    queue_depths: Annotated[
        str, typer.Option("--queue-depth", help="To combine, with commas.")
    ] = "1,2,6,16",
    threads: Annotated[str, typer.Option(help="To combine, with commas.")] = "1,2,6,16",
    engines: Annotated[
        str, typer.Option("--engine", help="To combine, with commas; default: all that can run.")
    ] = "",
    transfers: Annotated[
        str,
        typer.Option(
            "--transfer",
            help="cpu, cpu_gpu, gds, ... (docs/gpu.md), or gdsio's numbers (0 to 6); "
            "default: cpu, and with CUDA all that can be had.",
        ),
    ] = "",
    ops: Annotated[str, typer.Option("--op", help="write, read")] = "write,read",
    csv_file: Annotated[
        Path, typer.Option("--csv", help="Results; what is in it already is not measured again.")
    ] = Path("fastserial-sweep.csv"),
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Also draw heat maps (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Transfer raw bytes with every combination of settings, as gdsio sweeps.

    Writes are durable and read back, reads come from a file that is not in the page cache.
    Interrupted, it goes on where it was when started again with the same --csv. At the end it
    prints the settings that are clearly faster than the defaults, as variables to copy.
    """
    nbytes = parse_bytes(size)
    output.check_files(csv_file, plot_file)

    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from fastserial.bench.presenting import sweep_view
    from fastserial.bench.presenting.plot import check_plot
    from fastserial.bench.studies.sweep import Sweep, run_sweep
    from fastserial.console import new_console

    if plot_file is not None:
        check_plot(plot_file)
    grid = _grid(block_sizes, queue_depths, threads, engines, transfers, ops)
    console = new_console()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=console, transient=True, speed_estimate_period=_SPEED_PERIOD
    ) as progress:
        task = progress.add_task("making the data", total=None)
        results = run_sweep(
            Sweep(folder, nbytes, grid, runs),
            csv_file,
            lambda done, total, text: progress.update(
                task, completed=done, total=total, description=text
            ),
        )
    found = sweep_view.cells(results)
    sweep_view.show_sweep(found, console)
    for line in sweep_view.best_settings(found):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(f"{len(results)} results in {csv_file}", soft_wrap=True, markup=False)
    if plot_file is not None:
        sweep_view.plot(found, plot_file, f"{folder.absolute()}, {size} per transfer")
        console.print(f"heat maps in {plot_file}", soft_wrap=True, markup=False)


def _grid(
    block_sizes: str, queue_depths: str, threads: str, engine_names: str, transfers: str, ops: str
) -> Grid:
    """Return the values to combine.

    Raises:
        ConfigError: one of them is impossible.
        EngineUnavailableError: an engine asked for cannot run here.
    """
    import torch

    from fastserial import engines
    from fastserial.bench.studies.sweep import HOST, OPS, Grid, on_devices
    from fastserial.config import TRANSFERS, Config, parse_count

    names = _values(engine_names, str, "--engine")
    if not names:
        names = tuple(engine.name for engine in engines.survey() if engine.missing is None)
    for name in names:
        engines.load(name)
    where = _values(transfers, _transfer, "--transfer")
    if not where:
        where = (HOST, *on_devices()) if torch.cuda.is_available() else (HOST,)
    grid = Grid(
        _values(block_sizes, parse_bytes, "--block-size"),
        _values(queue_depths, parse_count, "--queue-depth"),
        _values(threads, parse_count, "--threads"),
        names,
        _among(where, TRANSFERS, "--transfer"),
        _among(_values(ops, str, "--op"), OPS, "--op"),
    )
    for size, depth, count in itertools.product(grid.block_sizes, grid.queue_depths, grid.threads):
        Config(block_size=size, queue_depth=depth, threads=count)
    return grid


def _transfer(word: str) -> str:
    """Return the transfer type of a word, or of gdsio's number for it."""
    from fastserial.config import TRANSFERS

    numbers = {str(number): word for number, word in enumerate(TRANSFERS)}
    return numbers.get(word, word)


def _values(text: str, parse: Callable[[str], _T], option: str) -> tuple[_T, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        return tuple(dict.fromkeys(parse(word) for word in words))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def _among(values: tuple[str, ...], known: tuple[str, ...], option: str) -> tuple[str, ...]:
    for value in values:
        if value not in known:
            raise ConfigError(f"{option}: {value!r} is none of {', '.join(known)}")
    return values
