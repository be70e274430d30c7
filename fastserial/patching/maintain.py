"""The commands of `fastserial patches`: show, build, check, and make a patch for a new torch.

Works on an installed torch, a wheel file or a folder that holds torch; torch is never imported.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

from fastserial.errors import PatchError
from fastserial.patching.patches import (
    MODULE,
    BuiltModule,
    Patch,
    build,
    candidates,
    patch_names,
    patches_dir,
    read_patch,
    split_lines,
)

__all__ = [
    "TorchSource",
    "check",
    "diff",
    "fitting",
    "new",
    "open_torch",
    "write_copies",
]

_FILE = f"{MODULE.replace('.', '/')}.py"
_VERSION = re.compile(r"""^__version__[^=\n]*=\s*(['"])(.+?)\1""", re.MULTILINE)


class TorchSource(NamedTuple):
    """A torch whose source was read.

    Attributes:
        version: its version, as `2.13.0+cpu`.
        where: the folder or wheel.
        text: the source of `MODULE`.
    """

    version: str
    where: str
    text: str


def open_torch(where: Path | None = None) -> TorchSource:
    """Read the installed torch (None), a wheel, or a folder that holds torch.

    Raises:
        PatchError: there is no torch.
    """
    if where is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise PatchError("torch is not installed")
        where = Path(spec.origin).parents[1]
    try:
        root = where if where.is_dir() else zipfile.Path(where)
        version = _VERSION.search((root / "torch/version.py").read_text(encoding="utf-8"))
        text = (root / _FILE).read_text(encoding="utf-8")
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise PatchError(f"{where} holds no torch: {error}") from error
    if version is None:
        raise PatchError(f"{where}/torch/version.py does not say the version")
    return TorchSource(version[2], str(where), text)


def fitting(source: TorchSource, folder: Path | None = None) -> Patch:
    """Return the patch that `install()` would choose for a torch.

    When none fits, return the one made for its release line, or else the newest: `check` reports
    the differences.

    Raises:
        PatchError: there are no patches.
    """
    patches = list(candidates(source.version, folder))
    if not patches:
        raise PatchError(f"there are no patches in {folder or patches_dir()}")
    fit = (patch for patch in patches if not any(check(source, patch).values()))
    return next(fit, patches[0])


def check(source: TorchSource, patch: Patch) -> dict[str, str | None]:
    """Return by function why its patch does not apply to a torch; None where it does."""
    found: dict[str, str | None] = {}
    for function in patch.functions:
        try:
            (built,) = build(source.text, patch._replace(functions=(function,))).functions
        except PatchError as error:
            found[function.name] = str(error)
        else:
            found[function.name] = built.problem
    return found


def diff(source: TorchSource, built: BuiltModule) -> str:
    """Return what our lines change as a unified diff, for `patch -p1`."""
    texts = (split_lines(source.text), split_lines(built.text))
    return "".join(difflib.unified_diff(*texts, f"a/{_FILE}", f"b/{_FILE}"))


def write_copies(folder: Path, source: TorchSource) -> list[Path]:
    """Write a full patched copy of torch's file and its diff, and return what was written.

    Raises:
        PatchError: no patch fits.
    """
    patch = fitting(source)
    built = build(source.text, patch)
    for function in built.functions:
        if function.problem is not None:
            raise PatchError(f"{source.where}: {function.problem}")
    copy = folder / Path(_FILE).with_suffix(f".fastserial-{patch.name}.py")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(built.text, encoding="utf-8")
    difference = copy.with_suffix(".diff")
    difference.write_text(diff(source, built), encoding="utf-8")
    return [copy, difference]


def new(source: TorchSource, folder: Path | None = None) -> Path:
    """Write the patch for a torch's release line, and return its path.

    It has the edits of the newest patch. A file for the line that exists already keeps its edits,
    and gets the new hashes added.

    Raises:
        PatchError: the edits do not fit this torch.
    """
    folder = folder or patches_dir()
    name = f"v{'.'.join(source.version.split('.')[:2])}"
    path = folder / f"{name}.toml"
    names = patch_names(folder)
    start = read_patch(name if name in names else names[0], folder)
    try:
        built = build(source.text, start)
    except PatchError as error:
        raise PatchError(
            f"{error}. Write an edit for it into {path} (CONTRIBUTING.md, 'A new torch release')"
        ) from error
    lines = ["[sha256]\n"]
    for function in built.functions:
        old = function.patch.hashes if start.name == name else ()
        hashes = [f'"{one}"' for one in dict.fromkeys((*old, function.sha256))]
        text = hashes[0] if len(hashes) == 1 else f"[{', '.join(hashes)}]"
        lines.append(f"{function.patch.name} = {text}\n")
    known = (folder / f"{start.name}.toml").read_text(encoding="utf-8")
    _, head, edits = known.partition("[edits.")
    if edits:
        lines += ["\n", head, edits]
    path.write_text("".join(lines), encoding="utf-8")
    return path
