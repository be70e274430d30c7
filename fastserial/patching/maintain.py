"""What `fastserial patches` does: list, show, build, check, and make a patch for a new torch.

Works on an installed torch, a wheel file, an unpacked folder or one source file; torch itself is
never imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from fastserial.errors import PatchError
from fastserial.patching.build import (
    BuiltModule,
    build_module,
    check_hashes,
    digest,
    split_lines,
    strip,
    unknown_names,
)
from fastserial.patching.patch_file import (
    Anchor,
    Edit,
    Patch,
    candidates,
    load_patches,
    patches_dir,
)

__all__ = [
    "CheckReport",
    "FunctionCheck",
    "TorchSource",
    "build",
    "check",
    "diff",
    "fitting",
    "new",
    "open_torch",
    "render",
]

_VERSION = re.compile(r"""^__version__[^=\n]*=\s*(['"])(.+?)\1""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TorchSource:
    """A torch whose files can be read.

    Attributes:
        version: its version; empty if it is not known.
        where: what it is, for people.
        read: return the bytes of a file by its path in a wheel, e.g. `torch/version.py`.
    """

    version: str
    where: str
    read: Callable[[str], bytes]

    def text(self, module: str) -> str:
        """Return the source of a module, line ends untouched.

        Raises:
            PatchError: it cannot be read.
        """
        try:
            return self.read(f"{module.replace('.', '/')}.py").decode()
        except (OSError, KeyError, UnicodeDecodeError) as error:
            raise PatchError(f"{self.where}: no source of {module}: {error}") from error


@dataclass(frozen=True, slots=True)
class FunctionCheck:
    """How one function fits its patch; see `CheckReport`."""

    function: str
    anchored: bool
    source_hash: bool
    built_hash: bool
    strips_back: bool
    problem: str | None

    @property
    def ok(self) -> bool:
        """All is as it should be."""
        return self.anchored and self.source_hash and self.built_hash and self.strips_back


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found.

    Attributes:
        torch: the version checked.
        where: the installation, wheel or file checked.
        patch: the patch checked.
        exact: the patch is made for this version.
        functions: per function: its anchors match one place each; its source and its built copy
            have the expected hashes, and our lines read no name that is not known there; without
            our lines the file is the original byte for byte.
    """

    torch: str
    where: str
    patch: str
    exact: bool
    functions: tuple[FunctionCheck, ...]

    @property
    def ok(self) -> bool:
        """The patch applies to this torch."""
        return all(function.ok for function in self.functions)

    def as_dict(self) -> dict[str, Any]:
        """Return it as a dictionary for JSON."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def open_torch(where: str | Path | None = None, version: str | None = None) -> TorchSource:
    """Open the installed torch (None), a wheel, a folder that holds torch, or a source file.

    Args:
        where: what to open.
        version: its version, if it does not say so itself.

    Raises:
        PatchError: there is no torch.
    """
    if where is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            raise PatchError("torch is not installed")
        where = Path(spec.submodule_search_locations[0])
    path = Path(where)
    read = _reader(path)
    try:
        found = _VERSION.search(read("torch/version.py").decode())
    except (OSError, KeyError, UnicodeDecodeError):
        found = None
    return TorchSource(version or (found.group(2) if found else ""), str(path), read)


def _reader(path: Path) -> Callable[[str], bytes]:
    if path.is_dir():
        root = path if (path / "torch").is_dir() else path.parent
        if not (root / "torch").is_dir():
            raise PatchError(f"{path} holds no torch")
        return lambda name: (root / name).read_bytes()
    if zipfile.is_zipfile(path):
        return lambda name: _from_wheel(path, name)
    if path.suffix == ".py" and path.is_file():
        return lambda name: path.with_name(name.rpartition("/")[2]).read_bytes()
    raise PatchError(f"{path} is not a wheel, a folder or a source file of torch")


def _from_wheel(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(name)


def fitting(source: TorchSource, patches: tuple[Patch, ...] | None = None) -> tuple[Patch, bool]:
    """Return the patch that `install()` would choose for a torch, and if it is made for it.

    When none fits, it is the one that comes nearest: `check` then says what differs.

    Raises:
        PatchError: there are no patches.
    """
    ordered = list(candidates(source.version, patches or load_patches()))
    if not ordered:
        raise PatchError(f"there are no patches in {patches_dir()}")
    for patch, exact in ordered:
        if all(function.ok for function in _checks(patch, source)):
            return patch, exact
    if ordered[0][1]:
        return ordered[0]
    return _nearest(source.version, [patch for patch, _ in ordered]), False


def _nearest(version: str, patches: list[Patch]) -> Patch:
    """Return the newest patch not newer than a version, or else the oldest (newest first)."""
    try:
        older = [patch for patch in patches if patch.oldest <= Version(version)]
    except InvalidVersion:
        older = patches
    return older[0] if older else patches[-1]


def check(
    source: TorchSource, patch: Patch | None = None, patches: tuple[Patch, ...] | None = None
) -> CheckReport:
    """Prove that a patch (by default the fitting one) applies to a torch.

    Raises:
        PatchError: there are no patches.
    """
    chosen = patch or fitting(source, patches)[0]
    return CheckReport(
        source.version,
        source.where,
        chosen.name,
        chosen.covers(source.version),
        tuple(_checks(chosen, source)),
    )


def _checks(patch: Patch, source: TorchSource) -> list[FunctionCheck]:
    found: list[FunctionCheck] = []
    for function in patch.functions:
        # one function at a time, so that each says its own trouble
        alone = patch._replace(functions=(function,))
        try:
            original = source.text(function.module)
            built = build_module(original, alone, function.module)
        except PatchError as error:
            found.append(FunctionCheck(function.full_name, False, False, False, False, str(error)))
            continue
        one = built.functions[0]
        expected = function.hashes.get(digest(one.original))
        unknown = unknown_names(original, function)
        found.append(
            FunctionCheck(
                function.full_name,
                anchored=True,
                source_hash=expected is not None,
                built_hash=unknown is None and expected == digest(one.text),
                strips_back=strip(built.text) == original and strip(one.text) == one.original,
                problem=unknown or check_hashes(built),
            )
        )
    return found


def _built(patch: Patch, source: TorchSource) -> list[BuiltModule]:
    built = [build_module(source.text(name), patch, name) for name in patch.modules]
    for module in built:
        for one in module.functions:
            if (reason := unknown_names(module.original, one.patch)) is not None:
                raise PatchError(f"{one.patch.full_name}: {reason}")
    return built


def diff(patch: Patch, source: TorchSource) -> str:
    """Return a patch against a torch as a unified diff, for `patch -p1`.

    Raises:
        PatchError: the patch does not apply.
    """
    return "".join(_diff(built) for built in _built(patch, source))


def _diff(built: BuiltModule) -> str:
    path = f"{built.module.replace('.', '/')}.py"
    return "".join(
        difflib.unified_diff(
            split_lines(built.original), split_lines(built.text), f"a/{path}", f"b/{path}"
        )
    )


def build(folder: Path, source: TorchSource, patch: Patch | None = None) -> list[Path]:
    """Write full patched copies of torch's files and their diffs, and return what was written.

    Raises:
        PatchError: the patch does not apply, or its hashes differ.
    """
    chosen = patch or fitting(source)[0]
    modules = _built(chosen, source)
    for built in modules:
        if (reason := check_hashes(built)) is not None:
            raise PatchError(f"{source.where}: {reason}")
    written: list[Path] = []
    for built in modules:
        copy = folder.joinpath(*built.module.split("."))
        copy = copy.with_name(f"{copy.name}.fastserial-{chosen.name}.py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(built.text.encode())
        difference = copy.with_suffix(".diff")
        difference.write_bytes(_diff(built).encode())
        written += [copy, difference]
    return written


def new(source: TorchSource, folder: Path | None = None, base: Patch | None = None) -> Path:
    """Write the patch for a torch release from the nearest patch's anchors, and return its path.

    A file for the release's line that exists already gets the new hashes added.

    Raises:
        PatchError: the version is not known or not the file's, or the lines do not fit.
    """
    folder = folder or patches_dir()
    patches = load_patches(folder)
    try:
        version = Version(source.version)
    except InvalidVersion:
        raise PatchError(
            f"{source.where}: its version is not known: name it with --torch-version"
        ) from None
    if base is None and not patches:
        raise PatchError(f"there are no patches in {folder} to start from")
    name = f"v{version.major}.{version.minor}"
    known = next((patch for patch in patches if patch.name == name), None)
    line = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    if known is not None and not known.covers(version.base_version):
        raise PatchError(
            f'{folder / name}.toml says torch = "{known.torch}", which is not for '
            f'{version.base_version}: write torch = "{line}" there'
        )
    start = known or base or _nearest(source.version, list(patches))
    hashes: dict[str, dict[str, str]] = {}
    try:
        modules = _built(start, source)
    except PatchError as error:
        raise PatchError(
            f"{error}. {folder / start.name}.toml does not fit: correct anchor or lines by hand in "
            f"{folder / name}.toml (CONTRIBUTING.md, 'A new torch release')"
        ) from error
    for built in modules:
        for one in built.functions:
            fresh = {digest(one.original): digest(one.text)}
            old = one.patch.hashes if known else {}
            hashes[one.patch.full_name] = {**old, **fresh}
    functions = tuple(
        function._replace(hashes=hashes[function.full_name]) for function in start.functions
    )
    made = Patch(name, known.torch if known else line, functions)
    path = folder / f"{name}.toml"
    path.write_text(render(made), encoding="utf-8")
    return path


def render(patch: Patch) -> str:
    """Return the text of a patch file."""
    module = patch.modules[0]
    parts = [f'torch = "{patch.torch}"\nmodule = "{module}"\n']
    for function in patch.functions:
        head = f'[[function]]\nname = "{function.name}"\n'
        if function.module != module:
            head += f'module = "{function.module}"\n'
        head += f"sha256 = {_strings(list(function.hashes))}\n"
        head += f"built_sha256 = {_strings(list(function.hashes.values()))}\n"
        parts.append(head)
        parts.extend(_render_edit(edit) for edit in function.edits)
    return "\n".join(parts)


def _strings(values: list[str]) -> str:
    quoted = [f'"{value}"' for value in values]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def _render_edit(edit: Edit) -> str:
    if "'''" in edit.insert:
        raise PatchError("inserted lines must not hold '''")
    return (
        f"[[function.edit]]\nanchor = {_render_anchor(edit.anchor)}\n"
        f"insert = '''\n{edit.insert.strip()}\n'''\n"
    )


def _render_anchor(anchor: Anchor) -> str:
    table: dict[str, str] = {"place": f'"{anchor.place}"'}
    if anchor.match is not None:
        table.update(anchor.match.table())
    if anchor.inside:
        table["inside"] = f"[{', '.join(map(str, anchor.inside))}]"
    return "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"
