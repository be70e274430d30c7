"""The patches: read them, choose one for a torch release, insert its lines into torch's source.

`patches/edits.toml` holds the lines to insert into `torch.serialization`, and where.
`patches/vX.Y.toml` has the hashes of the functions in one release line, and an edit where that line
needs another.
This module works on text only: it imports nothing of torch.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastserial.errors import PatchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "MODULE",
    "BuiltFunction",
    "BuiltModule",
    "FunctionPatch",
    "Patch",
    "build",
    "candidates",
    "line_of",
    "patch_names",
    "patches_dir",
    "read_patch",
    "split_lines",
]

MODULE = "torch.serialization"
BEGIN = "# >>> fastserial"
END = "# <<< fastserial"
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?")  # not a development or pre-release


class FunctionPatch(NamedTuple):
    """The edit of one function.

    Attributes:
        name: its name in `MODULE`.
        hashes: SHA-256 of its source in each release that the patch is for.
        before: the line, without its indentation, in front of which the lines go. The function
            has it once.
        insert: the lines; names that they make begin with `_fastserial`.
    """

    name: str
    hashes: tuple[str, ...]
    before: str
    insert: str


class Patch(NamedTuple):
    """The edits for one release line of torch, called after it: `v2.13`."""

    name: str
    functions: tuple[FunctionPatch, ...]

    def is_for(self, version: str) -> bool:
        """Return whether `version` is a release of the line, as `2.13.1+cpu` is one of `v2.13`."""
        return self.name == line_of(version)


class BuiltFunction(NamedTuple):
    """One function of the module, and its copy with our lines.

    Attributes:
        patch: the edit that made it.
        original: its source as installed.
        text: the copy's source.
        original_line: the number of the first line of `original` in the installed file.
        line: the number of the first line of `text` in the built file.
    """

    patch: FunctionPatch
    original: str
    text: str
    original_line: int
    line: int

    @property
    def sha256(self) -> str:
        """The SHA-256 of `original`."""
        return hashlib.sha256(self.original.encode()).hexdigest()

    @property
    def problem(self) -> str | None:
        """Why `original` is not what the patch was made for, or None."""
        if self.sha256 in self.patch.hashes:
            return None
        return f"the source of {MODULE}.{self.patch.name} is not the one this patch was made for"


class BuiltModule(NamedTuple):
    """The module's whole source with our lines, and the functions that have them."""

    text: str
    functions: tuple[BuiltFunction, ...]


def patches_dir() -> Path:
    """Return the folder of the patches: inside the wheel, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_patches"
    return shipped if shipped.is_dir() else package.parent / "patches"


def patch_names(folder: Path | None = None) -> list[str]:
    """Return the names of the patches in a folder (by default the shipped ones), newest first."""
    names = [path.stem for path in (folder or patches_dir()).glob("v*.toml")]
    return sorted(names, key=lambda name: [int(part) for part in name[1:].split(".")], reverse=True)


def line_of(version: str) -> str | None:
    """Return the name of the patch for a release of torch: `v2.13` for `2.13.1+cpu`.

    None for what is no release: `2.13.0a0+git1234`.
    """
    release = _RELEASE.fullmatch(version)
    return f"v{release[1]}" if release is not None else None


def candidates(version: str, folder: Path | None = None) -> Iterator[Patch]:
    """Yield the patch made for a version of torch, if there is one, then the others, newest first.

    Each is read when it is asked for: all ten take some 10 ms.

    Raises:
        PatchError: a file there is not a patch.
    """
    own = line_of(version)
    for name in sorted(patch_names(folder), key=lambda name: name != own):
        yield read_patch(name, folder)


def read_patch(name: str, folder: Path | None = None) -> Patch:
    """Read a patch of a folder (by default a shipped one).

    Raises:
        PatchError: there is none of that name, or a file is not as it should be.
    """
    folder = folder or patches_dir()
    try:
        common, own = (
            tomllib.loads((folder / f"{stem}.toml").read_text(encoding="utf-8"))
            for stem in ("edits", name)
        )
        hashes, edits = own.get("sha256", {}), own.get("edits", {})
        functions = tuple(
            FunctionPatch(
                function, _as_tuple(hashes.get(function, [])), **{**edit, **edits.get(function, {})}
            )
            for function, edit in common.items()
        )
    except (OSError, TypeError, ValueError) as error:
        raise PatchError(f"{folder / name}.toml is not a patch: {error!r}") from error
    return Patch(name, functions)


def _as_tuple(hashes: str | list[str]) -> tuple[str, ...]:
    return (hashes,) if isinstance(hashes, str) else tuple(hashes)


def build(source: str, patch: Patch) -> BuiltModule:
    """Insert a patch's lines into the module's source, whatever its hashes.

    Raises:
        PatchError: a function is not there, or has the line `before` not exactly once.
    """
    lines = split_lines(source)
    spans = sorted((*_span(lines, function.name), function) for function in patch.functions)
    built: list[str] = []
    functions: list[BuiltFunction] = []
    done = 0  # lines of the source
    for first, end, function in spans:
        built += lines[done:first]
        copy = _inserted(lines[first:end], function)
        functions.append(
            BuiltFunction(
                function, "".join(lines[first:end]), "".join(copy), first + 1, len(built) + 1
            )
        )
        built += copy
        done = end
    return BuiltModule("".join([*built, *lines[done:]]), tuple(functions))


def split_lines(text: str) -> list[str]:
    """Return the lines of a source text, ends included, as Python counts them."""
    # str.splitlines also splits on form feeds and the like, where the parser counts no line
    return io.StringIO(text).readlines()


def _span(lines: list[str], name: str) -> tuple[int, int]:
    """Return the index of a top-level function's first line, and the one behind its last.

    It is taken to end where a line begins in the first column; if that is in a string, the source
    has another hash than the patch, or the copy does not compile.
    """
    starts = [index for index, line in enumerate(lines) if line.startswith(f"def {name}(")]
    if len(starts) != 1:
        raise PatchError(f"{MODULE}.{name} is defined {len(starts)} times, not once")
    first = starts[0]
    end = first + 1
    while end < len(lines) and lines[end][0] in " \t\n#)":
        end += 1
    while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return first, end


def _inserted(lines: list[str], function: FunctionPatch) -> list[str]:
    at = [index for index, line in enumerate(lines) if line.strip() == function.before]
    if len(at) != 1:
        raise PatchError(
            f"{MODULE}.{function.name} has {len(at)} lines `{function.before}`, not one"
        )
    place = at[0]
    indent = lines[place][: -len(lines[place].lstrip())]
    ours = textwrap.indent(f"{BEGIN}\n{function.insert.strip()}\n{END}\n", indent)
    return [*lines[:place], *split_lines(ours), *lines[place:]]
