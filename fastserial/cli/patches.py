"""`fastserial patches list|show|build|check|new`: the command line of `maintain`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fastserial.console import new_console, say
from fastserial.errors import FastserialError, PatchError
from fastserial.patching import maintain, patch_file

__all__ = ["patches_app"]

patches_app = typer.Typer(
    name="patches",
    help="The versioned patches that let torch.save use fastserial.",
    no_args_is_help=True,
)

Torch = Annotated[
    Path | None,
    typer.Option(
        help="A torch wheel, an unpacked folder or a serialization.py; default: the installed one."
    ),
]
Version = Annotated[
    str | None, typer.Option("--torch-version", help="Its version, if it does not tell.")
]
Name = Annotated[
    str | None, typer.Option("--patch", help="A patch by name, e.g. v2.13; default: what fits.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except FastserialError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _named(name: str | None) -> patch_file.Patch | None:
    if name is None:
        return None
    patches = {patch.name: patch for patch in patch_file.load_patches()}
    if name not in patches:
        raise PatchError(f"there is no patch {name}; there are: {', '.join(patches)}")
    return patches[name]


@patches_app.command("list")
def list_patches(json_: AsJson = False) -> None:
    """List the patches; a star marks the one for the installed torch."""
    with _errors():
        patches = patch_file.load_patches()
        try:
            used = maintain.check(maintain.open_torch())
        except PatchError:
            used = None
    chosen = used.patch if used is not None and used.ok else None
    if json_:
        rows = [
            {
                "name": patch.name,
                "torch": patch.torch,
                "functions": [function.full_name for function in patch.functions],
                "used": patch.name == chosen,
            }
            for patch in patches
        ]
        typer.echo(json.dumps({"folder": str(patch_file.patches_dir()), "patches": rows}, indent=2))
        return
    table = Table("", "patch", "torch", "functions")
    for patch in patches:
        names = ", ".join(function.name for function in patch.functions)
        table.add_row("*" if patch.name == chosen else "", patch.name, patch.torch, names)
    new_console().print(table)


@patches_app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="Default: the one for the torch.")] = None,
    torch: Torch = None,
    torch_version: Version = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show it as a unified diff against the torch.")
    ] = False,
) -> None:
    """Print a patch file, or the diff it makes."""
    with _errors():
        patch = _named(name)
        if patch is None or diff:
            source = maintain.open_torch(torch, torch_version)
            patch = patch or maintain.fitting(source)[0]
        text = maintain.diff(patch, source) if diff else maintain.render(patch)
        typer.echo(text, nl=False)


@patches_app.command()
def build(
    folder: Annotated[Path, typer.Argument(help="Where to write.")],
    torch: Torch = None,
    torch_version: Version = None,
    name: Name = None,
    json_: AsJson = False,
) -> None:
    """Write full patched copies of torch's files, and their unified diffs, to a folder."""
    with _errors():
        source = maintain.open_torch(torch, torch_version)
        written = maintain.build(folder, source, _named(name))
    if json_:
        typer.echo(json.dumps([str(path) for path in written], indent=2))
        return
    for path in written:
        say(path)


@patches_app.command()
def check(
    torch: Torch = None,
    torch_version: Version = None,
    name: Name = None,
    json_: AsJson = False,
) -> None:
    """Prove that the patch applies to a torch; exit status 1 if it does not."""
    with _errors():
        source = maintain.open_torch(torch, torch_version)
        report = maintain.check(source, _named(name))
    if json_:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print_check(report)
    raise typer.Exit(0 if report.ok else 1)


def _print_check(report: maintain.CheckReport) -> None:
    console = new_console()
    where = f"torch {report.torch or '(unknown version)'} in {report.where}"
    console.print(where, markup=False, soft_wrap=True)
    relation = "is made for this version" if report.exact else "is made for another version"
    console.print(f"patch {report.patch} {relation}")
    table = Table("function", "anchors", "source hash", "built hash", "strips back")
    marks = {True: "yes", False: "NO"}
    for one in report.functions:
        results = (one.anchored, one.source_hash, one.built_hash, one.strips_back)
        table.add_row(one.function.rpartition(".")[2], *(marks[result] for result in results))
    console.print(table)
    for one in report.functions:
        if one.problem:
            console.print(f"{one.function}: {one.problem}", markup=False, soft_wrap=True)
    console.print("the patch applies" if report.ok else "the patch does NOT apply")


@patches_app.command()
def new(
    torch: Torch = None,
    torch_version: Version = None,
    name: Annotated[
        str | None, typer.Option("--from", help="The patch to start from; default: the nearest.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write; default: where the patches are.")
    ] = None,
) -> None:
    """Make the patch for a new torch release from the nearest patch's anchors."""
    with _errors():
        source = maintain.open_torch(torch, torch_version)
        path = maintain.new(source, folder, _named(name))
        say(path)
