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
from pathlib import Path
from typing import NamedTuple

from fastserial.errors import PatchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


MODULE = "torch.serialization"
BEGIN = "# >>> fastserial"
END = "# <<< fastserial"
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?")  # not a development or pre-release


class Edit(NamedTuple):
    """The edit of one function.

    Attributes:
        function: its name in `MODULE`.
        hashes: SHA-256 of its source in each release that the patch is for.
        before: the line, without its indentation, in front of which the lines go. The function
            has it once.
        insert: the lines; names that they make begin with `_fastserial`.
    """

    function: str
    hashes: tuple[str, ...]
    before: str
    insert: str


class Patch(NamedTuple):
    """The edits for one release line of torch, called after it: `v2.13`."""

    name: str
    edits: tuple[Edit, ...]

    def is_for(self, version: str) -> bool:
        """Return whether `version` is a release of the line, as `2.13.1+cpu` is one of `v2.13`."""
        return self.name == line_of(version)


class BuiltFunction(NamedTuple):
    """One function of the module, and its copy with our lines.

    Attributes:
        name: of the function.
        original: its source as installed.
        text: the copy's source.
        original_line: the number of the first line of `original` in the installed file.
        line: the number of the first line of `text` in the built file.
    """

    name: str
    original: str
    text: str
    original_line: int
    line: int


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


def choose(
    source: str, version: str, folder: Path | None = None
) -> tuple[Patch, dict[str, str | None]]:
    """Return the patch that fits the module's source, and what `check` says of it.

    That is the patch for the version of torch, or else one whose hashes are those of the source.
    If there is none: the one for the version, or else the newest.

    Raises:
        PatchError: there are no patches, or a file is not one.
    """
    names = patch_names(folder)
    if not names:
        raise PatchError(f"there are no patches in {folder or patches_dir()}")
    first: tuple[Patch, dict[str, str | None]] | None = None
    for name in sorted(names, key=lambda name: name != line_of(version)):
        patch = read_patch(name, folder)  # when its turn comes: all ten take some 10 ms
        problems = check(source, patch)
        if not any(problems.values()):
            return patch, problems
        first = first or (patch, problems)
    return first or (patch, problems)


def check(source: str, patch: Patch) -> dict[str, str | None]:
    """Return by function why a patch does not apply to the module's source; None where it does."""
    lines = split_lines(source)
    found: dict[str, str | None] = {}
    for edit in patch.edits:
        try:
            first, end = _span(lines, edit.function)
            _inserted(lines[first:end], edit)
        except PatchError as error:
            found[edit.function] = str(error)
        else:
            same = sha256("".join(lines[first:end])) in edit.hashes
            text = f"the source of {MODULE}.{edit.function} is not the one this patch was made for"
            found[edit.function] = None if same else text
    return found


def sha256(text: str) -> str:
    """Return the hash of a source, as the patches have it."""
    return hashlib.sha256(text.encode()).hexdigest()


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
        found = tuple(
            Edit(name, _as_tuple(hashes.get(name, [])), **{**edit, **edits.get(name, {})})
            for name, edit in common.items()
        )
    except (OSError, TypeError, ValueError) as error:
        raise PatchError(f"{folder / name}.toml is not a patch: {error!r}") from error
    return Patch(name, found)


def _as_tuple(hashes: str | list[str]) -> tuple[str, ...]:
    return (hashes,) if isinstance(hashes, str) else tuple(hashes)


def build(source: str, patch: Patch) -> tuple[str, tuple[BuiltFunction, ...]]:
    """Insert a patch's lines into the module's source, whatever its hashes.

    Returns:
        The whole source with the lines, and the functions that have them.

    Raises:
        PatchError: a function is not there, or has the line `before` not exactly once.
    """
    lines = split_lines(source)
    spans = sorted((*_span(lines, edit.function), edit) for edit in patch.edits)
    built: list[str] = []
    functions: list[BuiltFunction] = []
    done = 0  # lines of the source
    for first, end, edit in spans:
        built += lines[done:first]
        original, copy = lines[first:end], _inserted(lines[first:end], edit)
        texts = "".join(original), "".join(copy)
        functions.append(BuiltFunction(edit.function, *texts, first + 1, len(built) + 1))
        built += copy
        done = end
    return "".join([*built, *lines[done:]]), tuple(functions)


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


def _inserted(lines: list[str], edit: Edit) -> list[str]:
    at = [index for index, line in enumerate(lines) if line.strip() == edit.before]
    if len(at) != 1:
        raise PatchError(f"{MODULE}.{edit.function} has {len(at)} lines `{edit.before}`, not one")
    index = at[0]
    indent = lines[index][: -len(lines[index].lstrip())]
    ours = textwrap.indent(f"{BEGIN}\n{edit.insert.strip()}\n{END}\n", indent)
    return [*lines[:index], *split_lines(ours), *lines[index:]]
