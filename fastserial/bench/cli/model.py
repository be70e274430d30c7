"""`fastserial bench tensor` and `fastserial bench model`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastserial.bench.cli import output
from fastserial.bench.measuring.units import parse_bytes
from fastserial.bench.subjects.models import MODELS

if TYPE_CHECKING:
    from fastserial.bench.studies.comparison import Comparison
    from fastserial.bench.studies.model import Method
    from fastserial.bench.subjects.saving import Format

__all__ = ["ModelName", "model", "tensor"]

ModelName = Annotated[
    str, typer.Option(help=f"{', '.join(MODELS)}, or a folder with a transformers config.json.")
]
_Legacy = Annotated[
    bool | None,
    typer.Option("--legacy/--no-legacy", help="Only the legacy format, or only zip; default both."),
]
_Gpu = Annotated[bool, typer.Option("--gpu", help="Keep the tensors on the CUDA device.")]
_Loose = Annotated[
    bool, typer.Option("--loose/--no-loose", help="Also saves that do not wait for the disk.")
]


def tensor(
    folder: output.Folder,
    size: Annotated[str, typer.Option(help="Size of the tensor.")] = "1GiB",
    runs: output.Runs = 5,
    legacy: _Legacy = None,
    gpu: _Gpu = False,
    loose: _Loose = True,
    peers: output.Peers = True,
    with_fio: output.WithFio = True,
    lines: output.WithLines = False,
    json_file: output.JsonFile = None,
    csv_file: output.CsvFile = None,
    plot_file: output.PlotFile = None,
) -> None:
    """Save one tensor with every writer there is, interleaved, fio among them.

    Durable rows include the fsync of file and directory. What was written is read back or compared
    byte by byte; exit status 1 if it is wrong.
    """
    nbytes = parse_bytes(size)
    outputs = output.Outputs(json_file, csv_file, plot_file)
    outputs.check()

    from fastserial.bench.studies.model import run_tensor

    method = _method(folder, runs, legacy, loose, peers, with_fio)
    settings = {"nbytes": nbytes, "gpu": gpu}

    def measure(say: Callable[[str], None]) -> Comparison:
        return run_tensor(nbytes, gpu, method, say)

    _run("tensor", settings, method, outputs, lines, measure)


def model(
    folder: output.Folder,
    model: ModelName = "gpt2",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="With Adam's states.")] = False,
    half: Annotated[bool, typer.Option("--half", help="Weights in float16.")] = False,
    runs: output.Runs = 5,
    legacy: _Legacy = None,
    gpu: _Gpu = False,
    loose: _Loose = True,
    peers: output.Peers = True,
    with_fio: output.WithFio = True,
    lines: output.WithLines = False,
    json_file: output.JsonFile = None,
    csv_file: output.CsvFile = None,
    plot_file: output.PlotFile = None,
) -> None:
    """Save a model's checkpoint with every writer there is, interleaved, fio among them.

    The model has the architecture of the name and random weights; nothing is downloaded. The rest
    is as for `bench tensor`.
    """
    outputs = output.Outputs(json_file, csv_file, plot_file)
    outputs.check()

    import dataclasses

    from fastserial.bench.studies.model import run_model
    from fastserial.bench.subjects.model_state import ModelRecipe

    recipe = ModelRecipe(model, optimizer, half, gpu)
    method = _method(folder, runs, legacy, loose, peers, with_fio)
    settings = dataclasses.asdict(recipe)
    _run("model", settings, method, outputs, lines, lambda say: run_model(recipe, method, say))


def _method(
    folder: Path, runs: int, legacy: bool | None, loose: bool, peers: bool, with_fio: bool
) -> Method:
    from fastserial.bench.studies.model import Method

    chosen: dict[bool | None, tuple[Format, ...]] = {
        None: ("zip", "legacy"),
        True: ("legacy",),
        False: ("zip",),
    }
    return Method(folder, chosen[legacy], runs, loose, peers, with_fio)


def _run(
    benchmark: str,
    settings: dict[str, Any],
    method: Method,
    outputs: output.Outputs,
    lines: bool,
    measure: Callable[[Callable[[str], None]], Comparison],
) -> None:
    import dataclasses

    from fastserial.bench.presenting.export import comparison_as_json
    from fastserial.bench.presenting.save_view import caption, show_comparison
    from fastserial.console import new_console

    console = new_console()
    with output.progress(console) as show:
        found = measure(show)
    show_comparison(found, console, lines)
    content = comparison_as_json(benchmark, found, {**settings, **dataclasses.asdict(method)})
    outputs.write(benchmark, found.lines, content, caption(found))
    raise typer.Exit(0 if found.right else 1)
