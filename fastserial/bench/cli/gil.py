"""`fastserial bench gil`."""

from __future__ import annotations

from typing import Annotated

import typer

from fastserial.bench.cli import output
from fastserial.bench.measuring.units import parse_bytes

__all__ = ["gil"]


def gil(
    folder: output.Folder,
    size: Annotated[str, typer.Option(help="Size of the state dict.")] = "3GiB",
    tensors: output.Tensors = 300,
    runs: output.Runs = 3,
    pause: Annotated[float, typer.Option(min=0, help="Seconds of rest before each row.")] = 0.3,
    json_file: output.JsonFile = None,
) -> None:
    """Show how long a save in the background holds up a thread that computes in Python.

    Python lets a thread wait 5 ms before it asks another one for the interpreter's lock.
    """
    nbytes = parse_bytes(size)
    output.Outputs(json_file).check()

    from fastserial.bench.presenting.export import write_json
    from fastserial.bench.presenting.gil_view import gil_as_json, show_gil
    from fastserial.bench.studies.gil import GilBench, run_gil
    from fastserial.console import new_console

    console = new_console()
    with output.progress(console) as show:
        result = run_gil(GilBench(folder, nbytes, tensors, runs, pause), show)
    show_gil(result, console)
    if json_file is not None:
        write_json(json_file, gil_as_json(result))
