"""The command line. Heavy imports (torch first) wait until a command needs them."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fastserial import __version__
from fastserial.cli.bench import bench_app, demo
from fastserial.cli.convert import convert
from fastserial.cli.inspect import inspect
from fastserial.cli.patches import patches_app
from fastserial.cli.verify import verify
from fastserial.console import say
from fastserial.errors import CorruptCheckpointError, FastserialError

_DAMAGED, _USAGE_ERROR = 1, 2
_STDERR = 2  # the last of the standard streams


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EOFError as error:  # typer takes it for the end of what a user types: status 1
            raise RuntimeError(f"EOFError: {error}") from error


app = typer.Typer(
    name="fastserial",
    cls=_Commands,
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


class _Output(io.TextIOWrapper):
    """Standard output or standard error. After its first failure, what is written to it is lost.

    If it is standard output, the program ends, with status 2. Otherwise typer would end it with 1
    where the reader of a pipe is gone, which means damage here.
    """

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Send what is left nowhere, also at the end of the process."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self is sys.stdout:
            if error.errno != errno.EPIPE:
                say(f"error: standard output: {error.strerror}", err=True)
            raise SystemExit(_USAGE_ERROR) from None


def _prepare_streams() -> None:
    """Make standard output and standard error fit for commands.

    A terminal that cannot show a character is no error. The number of a standard stream that is
    closed would be that of the next file that is opened, and C code would write its messages there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it is closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif type(stream) is io.TextIOWrapper:
            encoding, by_line = stream.encoding, stream.line_buffering
            stream = _Output(stream.detach(), encoding, "backslashreplace", line_buffering=by_line)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def main() -> None:
    """Run the command line; an error is one line, and exit status 2 (1 for damage).

    With `python -X dev -m fastserial`, an error that nobody expected has its traceback.
    """
    _prepare_streams()
    try:
        app()
    except (FastserialError, OSError) as error:
        say(f"error: {error}", err=True)
        damaged = isinstance(error, CorruptCheckpointError)
        raise SystemExit(_DAMAGED if damaged else _USAGE_ERROR) from None
    except Exception as error:
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing.partition(".")[0] == "torch":
            text = "this needs torch, which is not installed: pip install torch"
        elif sys.flags.dev_mode:
            raise
        else:
            text = f"{type(error).__name__}: {error} (unexpected; `python -X dev` shows where)"
        say(f"error: {text}", err=True)
        raise SystemExit(_USAGE_ERROR) from None
