"""The files in `patches/`: read them, and choose one for a torch release."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastserial.errors import PatchError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

__all__ = [
    "PLACES",
    "Anchor",
    "Edit",
    "FunctionPatch",
    "Match",
    "Patch",
    "candidates",
    "load_patches",
    "patches_dir",
    "read_patch",
    "shipped_candidates",
    "tomllib",
]


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
PLACES = ("start", "before", "after")
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+.*)?")  # not a dev or pre-release


class Match(NamedTuple):
    """The shape of one statement.

    Attributes:
        statement: its class in `ast`, e.g. `For`.
        calls: a function or method called somewhere inside it.
        name: the name it defines (`FunctionDef`, `ClassDef`).
        last: it must be the last statement of its block.
    """

    statement: str
    calls: str | None = None
    name: str | None = None
    last: bool = False

    def table(self) -> dict[str, str]:
        """Return the keys and values of its table in a patch file."""
        shown = {"statement": self.statement, "calls": self.calls, "name": self.name}
        found = {key: f'"{value}"' for key, value in shown.items() if value is not None}
        return {**found, **({"last": "true"} if self.last else {})}

    def __str__(self) -> str:
        """Return its table in a patch file."""
        return "{" + ", ".join(f"{key} = {value}" for key, value in self.table().items()) + "}"


class Anchor(NamedTuple):
    """Where lines go in a function.

    Attributes:
        place: `start` (after the docstring), or `before`/`after` the statement of `match`.
        match: the statement; it must be the only one of its shape in its block.
        inside: statements to step into first, from the outermost.
    """

    place: str
    match: Match | None = None
    inside: tuple[Match, ...] = ()


class Edit(NamedTuple):
    """Lines to insert at an anchor; names that they make begin with `_fastserial`."""

    anchor: Anchor
    insert: str


class FunctionPatch(NamedTuple):
    """The edits of one function.

    Attributes:
        module: the module it lives in.
        name: its name there.
        hashes: SHA-256 of the source as torch ships it → SHA-256 of the built one.
        edits: what to insert.
    """

    module: str
    name: str
    hashes: Mapping[str, str]
    edits: tuple[Edit, ...]

    @property
    def full_name(self) -> str:
        """The dotted name, e.g. `torch.serialization._save`."""
        return f"{self.module}.{self.name}"


class Patch(NamedTuple):
    """All edits for one release line of torch.

    Attributes:
        name: the file's stem, e.g. `v2.13`.
        torch: version specifier of the releases it is made for.
        functions: the functions it edits.
    """

    name: str
    torch: str
    functions: tuple[FunctionPatch, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules it edits, each once."""
        return tuple(dict.fromkeys(function.module for function in self.functions))

    @property
    def oldest(self) -> Version:
        """The oldest version in the specifier."""
        from packaging.version import Version

        return min(Version(part.version.removesuffix(".*")) for part in _specifier(self.torch))

    def covers(self, version: str) -> bool:
        """Tell whether the specifier holds `version` (local parts such as `+cpu` are ignored)."""
        from packaging.version import InvalidVersion, Version

        try:
            return _specifier(self.torch).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False


def _specifier(text: str) -> SpecifierSet:
    # here: it takes 9 ms, an eighth of `install()`, which for most releases goes without
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(text)


def patches_dir() -> Path:
    """Return the folder of the patches: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_patches"
    return shipped if shipped.is_dir() else package.parent / "patches"


def read_patch(path: Path) -> Patch:
    """Read one patch file.

    Raises:
        PatchError: the file is not a patch.
    """
    patch = _read(path)
    try:
        _specifier(patch.torch)
    except ValueError as error:
        raise PatchError(f"{path} is not a patch: {error!r}") from error
    return patch


def _read(path: Path) -> Patch:
    """Read one patch file, and take what it says of releases as it is."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        module = table.get("module", "")
        functions = tuple(_function(entry, module) for entry in table["function"])
        patch = Patch(path.stem, str(table["torch"]), functions)
    except PatchError as error:
        raise PatchError(f"{path} is not a patch: {error}") from None
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise PatchError(f"{path} is not a patch: {error!r}") from error
    if not functions or len({f.full_name for f in functions}) != len(functions):
        raise PatchError(f"{path} is not a patch: it must name each function once")
    return patch


def _function(table: Mapping[str, Any], module: str) -> FunctionPatch:
    # without hashes it fits no torch; `fastserial patches new` adds them
    before, after = _hashes(table.get("sha256", [])), _hashes(table.get("built_sha256", []))
    try:
        if len(before) != len(after):
            raise PatchError(
                f"it has {len(before)} sha256 and {len(after)} built_sha256; delete them all, and "
                "`fastserial patches new` adds them"
            )
        edits = tuple(Edit(_anchor(edit["anchor"]), edit["insert"]) for edit in table["edit"])
    except PatchError as error:
        raise PatchError(f"{table['name']}: {error}") from None
    hashes = dict(zip(before, after, strict=True))
    return FunctionPatch(table.get("module", module), table["name"], hashes, edits)


def _hashes(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _anchor(table: Mapping[str, Any]) -> Anchor:
    shape = dict(table)
    place = shape.pop("place")
    inside = tuple(_match(step) for step in shape.pop("inside", ()))
    match = _match(shape) if shape else None
    if place not in PLACES or (place == "start") != (match is None):
        raise PatchError(
            f"the anchor {dict(table)} needs `place`: start, or before or after a `statement`"
        )
    return Anchor(place, match, inside)


def _match(shape: Mapping[str, Any]) -> Match:
    if "statement" not in shape or not shape.keys() <= set(Match._fields):
        keys = ", ".join(Match._fields[1:])
        raise PatchError(f"the anchor {dict(shape)} needs `statement`, and may have {keys}")
    return Match(**shape)


def load_patches(folder: Path | None = None) -> tuple[Patch, ...]:
    """Return the patches of a folder (by default the shipped ones), newest first.

    Raises:
        PatchError: a file there is not a patch.
    """
    paths = (folder or patches_dir()).glob("v*.toml")
    return tuple(sorted(map(read_patch, paths), key=lambda patch: patch.oldest, reverse=True))


def shipped_candidates(version: str) -> Iterator[tuple[Patch, bool]]:
    """Yield what `candidates` does of the shipped patches, each read when it is needed.

    For a release that is one, named like its line; all ten and their specifiers take 15 ms.

    Raises:
        PatchError: a file there is not a patch.
    """
    named: Patch | None = None
    release = _RELEASE.fullmatch(version)
    if release is not None and (path := patches_dir() / f"v{release[1]}.toml").is_file():
        named = _read(path)
        yield named, True
    for patch, exact in candidates(version, load_patches()):
        if named is None or patch.name != named.name:
            yield patch, exact


def candidates(version: str, patches: tuple[Patch, ...]) -> Iterator[tuple[Patch, bool]]:
    """Yield (patch, made for this version), the ones made for it first, then the newest."""
    exact = [patch for patch in patches if patch.covers(version)]
    for patch in exact:
        yield patch, True
    for patch in patches:
        if patch not in exact:
            yield patch, False
