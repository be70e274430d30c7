"""The patches: read them, choose one for a torch release, insert its lines into torch's source.

`prepare` compiles patched copies of torch's functions from the installed source.

`patches/edits.toml` holds the lines to insert into `torch.serialization`, and where.
`patches/vX.Y.toml` has the hashes of the functions in one release line, and an edit where that line
needs another.
All but `prepare` works on text only: nothing of torch is imported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import linecache
import os
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any, NamedTuple

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


# -- patched copies of the functions -------------------------------------------------------------


class Swap(NamedTuple):
    """A name in a module, torch's object for it, and ours that takes its place."""

    namespace: dict[str, Any]
    name: str
    original: Any
    ours: Any

    @property
    def full_name(self) -> str:
        return f"{self.namespace['__name__']}.{self.name}"

    @property
    def current(self) -> object:
        """What the module has under the name."""
        return self.namespace.get(self.name)

    @property
    def in_force(self) -> bool:
        return self.current is self.ours


class Installation(NamedTuple):
    """A patch made ready. Whether it is in force is read from torch's namespace.

    Attributes:
        patch: the name of the patch.
        exact: it is made for the version of torch that is imported.
        swaps: the functions.
    """

    patch: str
    exact: bool
    swaps: tuple[Swap, ...]

    @property
    def in_force(self) -> bool:
        """Whether torch runs one of our functions, at least."""
        return any(swap.in_force for swap in self.swaps)


def prepare(version: str) -> Installation:
    """Find the patch that fits and compile its functions; torch is not touched.

    Raises:
        PatchError: there is none for this version, or the installed torch is not as released.
    """
    module = importlib.import_module(MODULE)
    source = _source(module)
    patch, problems = choose(source, version)
    exact = patch.is_for(version)
    for problem in filter(None, problems.values()):
        if not exact:
            raise PatchError(f"fastserial has no patch for torch {version}")
        raise PatchError(f"torch {version} is not as released: {problem}")
    text, functions = build(source, patch)
    # below torch's own path, because torch.compile decides by path what it must not trace
    stem, extension = os.path.splitext(str(module.__file__))
    file = f"{stem}.fastserial-{patch.name}{extension}"
    swaps = []
    for function in functions:
        original = _running(module, function)
        ours = _patched(function, original, file)
        swaps.append(Swap(vars(module), function.name, original, ours))
    # for tracebacks; no modification time: linecache then never looks for the file on disk
    linecache.cache[file] = (len(text), None, split_lines(text), file)
    return Installation(patch.name, exact, tuple(swaps))


def _source(module: types.ModuleType) -> str:
    loader: Any = getattr(module.__spec__, "loader", None)
    try:
        text = loader.get_source(module.__name__)
    except (AttributeError, ImportError, OSError) as error:
        raise PatchError(f"the source of {module.__name__} cannot be read: {error}") from error
    if text is None:
        raise PatchError(f"the source of {module.__name__} is not installed")
    return str(text)


def _running(module: types.ModuleType, built: BuiltFunction) -> types.FunctionType:
    """Return torch's function, if it is the one in the installed file."""
    function = vars(module).get(built.name)
    if (
        not isinstance(function, types.FunctionType)
        or function.__globals__ is not vars(module)
        or function.__code__.co_firstlineno != built.original_line
        or function.__code__.co_filename != module.__file__
    ):
        raise PatchError(
            f"{module.__name__}.{built.name} is not the function in its source file: other "
            "code replaced it, or the file changed after the import"
        )
    return function


def _patched(built: BuiltFunction, original: types.FunctionType, file: str) -> types.FunctionType:
    """Return a copy of a function that runs the built code.

    Only the code is new: defaults, annotations and decorators are not evaluated a second time.
    """
    flags = original.__code__.co_flags & annotations.compiler_flag  # of its `from __future__`
    text = "\n" * (built.line - 1) + built.text  # so its lines have the numbers of the built file
    outer = compile(text, file, "exec", flags=flags, dont_inherit=True)
    code = next(
        constant
        for constant in outer.co_consts
        if isinstance(constant, types.CodeType) and constant.co_name == original.__name__
    )
    patched = types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__
    )
    patched.__kwdefaults__ = original.__kwdefaults__
    functools.update_wrapper(patched, original)
    del patched.__wrapped__  # type: ignore[attr-defined]  # `inspect` is to show ours
    return patched
