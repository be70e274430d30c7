"""`fastserial bench ...` and `demo`. What needs torch is imported when a command runs."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fastserial.bench.measure import parse_bytes
from fastserial.progress import show_line

if TYPE_CHECKING:
    from fastserial.bench.table import Result


bench_app = typer.Typer(
    help="Measure saves and loads on this machine, with stock torch and fio in the same run.",
    no_args_is_help=True,
)

TorchFormat = Enum("TorchFormat", {"zip": "zip", "legacy": "legacy"})

_Folder = Annotated[Path, typer.Option(help="The folder to write to; its disk is measured.")]
_Size = Annotated[str, typer.Option(help="Size of the state dict.")]
_Tensors = Annotated[int, typer.Option(min=1, help="Tensors of mixed sizes in it.")]
_Runs = Annotated[int, typer.Option(min=1, help="Rounds, after one warm-up.")]
_Fio = Annotated[bool, typer.Option("--fio/--no-fio", help="Compare with fio.")]
_Gpu = Annotated[bool, typer.Option("--gpu", help="The tensors are on the CUDA device.")]
_Formats = Annotated[list[TorchFormat] | None, typer.Option("--format", help="Only these.")]
_Json = Annotated[Path | None, typer.Option("--json", help="Also write all results to this file.")]


class Temperature(str, Enum):
    """What of the file is in the page cache."""

    cold = "cold"
    warm = "warm"


@bench_app.command()
def save(
    folder: _Folder,
    size: _Size = "3GiB",
    tensors: _Tensors = 300,
    gpu: _Gpu = False,
    runs: _Runs = 5,
    formats: _Formats = None,
    engines: Annotated[bool, typer.Option(help="Also the other engines.")] = True,
    with_fio: _Fio = True,
    json_file: _Json = None,
) -> None:
    """Save a checkpoint with stock torch, fastserial and fio in turn.

    Every durable row includes the fsync of file and directory. Options of fastserial are taken
    from FASTSERIAL_* variables. Exit status 1 if a file differs from stock torch's.
    """
    from fastserial.bench.save import SaveBench, run_save

    bench = SaveBench(
        folder=folder,
        nbytes=parse_bytes(size),
        tensors=tensors,
        gpu=gpu,
        runs=runs,
        with_fio=with_fio,
        formats=tuple(one.value for one in dict.fromkeys(formats or TorchFormat)),
        with_engines=engines,
    )
    _run(lambda say: run_save(bench, say), json_file)


@bench_app.command()
def load(
    folder: _Folder,
    size: _Size = "3GiB",
    tensors: _Tensors = 300,
    gpu: _Gpu = False,
    runs: _Runs = 5,
    temperature: Annotated[
        list[Temperature] | None, typer.Option(help="Only these rows; may be repeated.")
    ] = None,
    with_fio: _Fio = True,
    json_file: _Json = None,
) -> None:
    """Load a checkpoint with stock torch, fastserial and fio in turn.

    Cold: nothing of the file is in the page cache; warm: all of it is. The loaded tensors are
    compared with the saved ones; exit status 1 if they differ.
    """
    from fastserial.bench.load import LoadBench, run_load

    bench = LoadBench(
        folder=folder,
        nbytes=parse_bytes(size),
        tensors=tensors,
        gpu=gpu,
        runs=runs,
        with_fio=with_fio,
        temperatures=tuple(one.value for one in dict.fromkeys(temperature or Temperature)),
    )
    _run(lambda say: run_load(bench, say), json_file)


def demo(
    folder: Annotated[
        Path, typer.Option(help="The folder to write to; it needs about twice the size.")
    ],
    size: Annotated[str, typer.Option(help="Approximate size of the checkpoint.")] = "1GB",
    runs: Annotated[int, typer.Option(min=1, help="Saves of each kind.")] = 3,
    crash: Annotated[
        bool, typer.Option("--crash", help="Instead: kill saving processes, and load what is left.")
    ] = False,
) -> None:
    """Save a checkpoint with stock torch and with fastserial, and compare the files.

    Exit status 1 if a file differs, or if torch.load gets neither the old nor the new checkpoint
    after a killed save by fastserial.
    """
    nbytes = parse_bytes(size)
    if crash:
        _crash(folder, nbytes, runs)
    from fastserial.bench.save import run_demo

    _run(lambda say: run_demo(folder, nbytes, runs, say))


def _crash(folder: Path, nbytes: int, runs: int) -> NoReturn:
    """Kill saves, show what `torch.load` gets, and exit."""
    from fastserial.bench.crash import MIXED, NEW, OLD, run_crash
    from fastserial.console import print_table, say

    found = run_crash(folder, nbytes, runs, show_line)
    rows = []
    for name, one in found.items():
        errors = [text for text in one if text not in (OLD, NEW, MIXED)]
        nothing = sum(one[text] for text in errors)
        rows.append((name, one[OLD], one[NEW], one[MIXED], nothing, "; ".join(errors) or "-"))
    columns = ("saved with", "old checkpoint", "new one", "parts of both", "nothing")
    say(f"A process was killed (SIGKILL) during a save over a checkpoint, {runs} times each")
    print_table((*columns, "what torch.load says"), rows)
    whole = found["fastserial"][OLD] + found["fastserial"][NEW]
    raise typer.Exit(0 if whole == runs else 1)


def _run(
    measure: Callable[[Callable[[str], None]], Result],
    json_file: Path | None = None,
) -> None:
    """Measure, show what was found, and write the file that is wanted."""
    from fastserial.bench.table import check_files

    check_files(json_file)
    result = measure(show_line)
    result.show()
    result.write(json_file)
    raise typer.Exit(0 if result.right else 1)
