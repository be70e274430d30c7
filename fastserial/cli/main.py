"""The command line. Heavy imports (torch first) wait until a command needs them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from fastserial import __version__
from fastserial.cli.bench import bench_app, demo
from fastserial.cli.convert import convert
from fastserial.cli.inspect import inspect
from fastserial.cli.patches import patches_app
from fastserial.cli.verify import verify
from fastserial.console import say
from fastserial.errors import CorruptCheckpointError, FastserialError

_DAMAGED, _USAGE_ERROR = 1, 2

app = typer.Typer(
    name="fastserial",
    help="torch.save and torch.load at the speed of your disk, safe after a crash.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(patches_app, name="patches")
app.command()(verify)
app.command()(inspect)
app.command()(convert)
app.command()(demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastserial {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    folder: Annotated[Path | None, typer.Argument(help="A folder for checkpoints.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report how saves and loads run on this machine, what makes them slow, and the remedies.

    Exit status 1 if stock torch does saves or loads, or if they are slow or fail.
    """
    from fastserial.cli.doctor import show
    from fastserial.diagnosis import examine as examination

    diagnosis = examination.examine(folder)
    if as_json:
        typer.echo(diagnosis.to_json())
    else:
        show(diagnosis)
    raise typer.Exit(0 if diagnosis.fast else 1)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    argv: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]... | -m MODULE [ARGS]... | COMMAND [ARGS]...", show_default=False
        ),
    ] = None,
) -> None:
    """Run a Python program, and every Python process it starts, with fastserial.

    Or a command, such as torchrun, that starts them.
    """
    from fastserial.cli.run import run as become

    become(argv or [])


def main() -> None:
    """Run the command line; an expected error is one line, and exit status 2 (1 for damage)."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character is no error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except (FastserialError, OSError) as error:
        say(f"error: {error}", err=True)
        damaged = isinstance(error, CorruptCheckpointError)
        raise SystemExit(_DAMAGED if damaged else _USAGE_ERROR) from None
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        say("error: this needs torch, which is not installed: pip install torch", err=True)
        raise SystemExit(_USAGE_ERROR) from None
