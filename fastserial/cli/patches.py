"""`fastserial patches list|show|check|new`: the command line of `maintain`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fastserial.console import say
from fastserial.errors import PatchError
from fastserial.patching import maintain, patches

patches_app = typer.Typer(
    name="patches",
    help="The patches that let torch.save and torch.load use fastserial.",
    no_args_is_help=True,
)

Torch = Annotated[
    Path | None,
    typer.Option(help="A torch wheel, or a folder that holds torch; default: the installed one."),
]


@patches_app.command("list")
def list_patches() -> None:
    """List the torch releases that have a patch; a star marks the one that applies here."""
    used: str | None = None
    with suppress(PatchError):  # no torch is installed
        source = maintain.open_torch()
        patch, problems = patches.choose(source.text, source.version)
        used = None if any(problems.values()) else patch.name
    for name in patches.patch_names():
        say(f"{'*' if name == used else ' '} {name:6} torch {name[1:]}.*")


@patches_app.command()
def show(torch: Torch = None) -> None:
    """Print what the patch changes in torch, as a unified diff."""
    typer.echo(maintain.diff(maintain.open_torch(torch)), nl=False)


@patches_app.command()
def check(
    torch: Torch = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether a patch applies to torch and which functions differ; exit status 1 if not."""
    source = maintain.open_torch(torch)
    patch, found = patches.choose(source.text, source.version)
    ok = not any(found.values())
    exact = patch.is_for(source.version)
    if as_json:
        report = {
            "torch": source.version,
            "where": source.where,
            "patch": patch.name,
            "exact": exact,
            "ok": ok,
            "functions": found,
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        made = "made for it" if exact else "made for other releases"
        say(f"torch {source.version}, {source.where}: patch {patch.name}, {made}")
        for name, problem in found.items():
            say(f"{name}: {problem or 'ok'}")
        say("the patch applies" if ok else "the patch does NOT apply")
    raise typer.Exit(0 if ok else 1)


@patches_app.command()
def new(
    torch: Torch = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write; default: where the patches are.")
    ] = None,
) -> None:
    """Make the patch for a new torch release, or add its hashes to the patch of its line."""
    say(maintain.new(maintain.open_torch(torch), folder))
