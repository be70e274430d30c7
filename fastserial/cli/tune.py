"""`fastserial tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastserial.bench.measuring.units import parse_bytes
from fastserial.console import say
from fastserial.errors import ConfigError, FastserialError

if TYPE_CHECKING:
    from rich.console import Console

    from fastserial.bench.studies.tuning import Tuned

__all__ = ["tune"]


def tune(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder that checkpoints are saved to.")
    ] = None,
    size: Annotated[
        str, typer.Option(help="The most that one save writes; a slow or full disk gets less.")
    ] = "1GiB",
    seconds: Annotated[float, typer.Option(min=1, help="About how long it may take.")] = 90,
    pairs: Annotated[int, typer.Option(min=7, help="Of the final comparison.")] = 11,
    show: Annotated[bool, typer.Option("--show", help="Show what was found so far.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget what was found for FOLDER's device.")
    ] = False,
) -> None:
    """Find the best settings for the device of a folder, and use them for saves there.

    Settings that are not clearly faster than the defaults, in freshly measured pairs, are not kept.
    FASTSERIAL_TUNED=0 switches the use of tuned settings off; `fastserial doctor FOLDER` shows
    what is in force.
    """
    from fastserial.console import new_console
    from fastserial.diagnosis.folder import folder_problem

    console = new_console()
    if show and forget:
        raise ConfigError("give --show or --forget, not both")
    if folder is None and not show:
        what = "to forget: --forget FOLDER" if forget else "to tune for, or --show"
        raise ConfigError(f"give the FOLDER {what}")
    if folder is not None:
        problem = folder_problem(folder)
        if problem is not None:
            raise FastserialError(problem)
    if show:
        _show_all(console, folder)
    elif folder is not None and forget:
        _forget(folder)
    elif folder is not None:
        _tune(folder, parse_bytes(size), seconds, pairs, console)


def _tune(folder: Path, nbytes: int, seconds: float, pairs: int, console: Console) -> None:
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from fastserial.bench.studies.tuning import tune_folder
    from fastserial.tuning import lookup
    from fastserial.tuning.store import Settings

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("making the data", total=1.0)
        found = tune_folder(
            folder,
            nbytes,
            seconds,
            pairs,
            lambda done, text: progress.update(task, completed=done, description=text),
        )
    _show(found, console)
    accepted = found.verdict is not None and found.verdict.accepted
    if accepted and Settings.of(lookup.config_for(folder)) != found.candidate:
        console.print(
            "[yellow]Not all of it is in force: options that are set win; "
            f"fastserial doctor {escape(str(folder))} shows which.[/yellow]",
            soft_wrap=True,
        )


def _show(found: Tuned, console: Console) -> None:
    from rich.markup import escape

    from fastserial.reports import format_bytes

    made = f"{found.saves} durable saves of {format_bytes(found.nbytes)}"
    lines = [
        found.device,
        f"{made} with {found.tried} settings in {found.seconds:.0f} s",
        f"defaults:  {found.default}",
    ]
    if found.verdict is None:
        lines.append("Nothing looked faster than the defaults: they are kept.")
    else:
        lines.append(f"candidate: {found.candidate}")
        ratios = ", ".join(f"{ratio:.2f}" for ratio in found.verdict.ratios)
        lines.append(f"speed over the defaults, pair by pair: {ratios}")
        kept = (
            "The candidate is used from now on"
            if found.verdict.accepted
            else ("The defaults are kept")
        )
        lines.append(f"{kept}: {found.verdict.reason}.")
    lines.append(f"Noted in {found.file}, for {found.key}.")
    for line in lines:
        console.print(escape(line), soft_wrap=True)


def _show_all(console: Console, folder: Path | None) -> None:
    from rich.markup import escape

    from fastserial.tuning import lookup
    from fastserial.tuning.store import location, read

    entries = read()
    if folder is not None:
        key, entry = lookup.entry_for(folder)
        entries = {key: entry} if entry is not None else {}
    if not entries:
        where = f" for {folder}" if folder is not None else ""
        console.print(escape(f"nothing{where} in {location()}"), soft_wrap=True)
    for key, entry in entries.items():
        console.print(f"[bold]{escape(key)}[/bold]", soft_wrap=True)
        console.print(escape(f"  {entry.device}; tuned in {entry.folder}"), soft_wrap=True)
        settings = str(entry.settings) if entry.settings else "the defaults"
        gain = f", the best candidate {entry.gain:.2f} × as fast as they" if entry.gain else ""
        if entry.settings:
            gain = f", {entry.gain:.2f} × as fast as the defaults" if entry.gain else ""
        console.print(
            escape(f"  {settings}{gain} ({entry.pairs} pairs, {entry.when})"), soft_wrap=True
        )


def _forget(folder: Path) -> None:
    from fastserial.tuning import lookup, store

    key, _ = lookup.entry_for(folder)
    done = store.forget(key)
    lookup.forget_cache()
    say(f"forgotten: {key}" if done else f"nothing is known of {key}")
