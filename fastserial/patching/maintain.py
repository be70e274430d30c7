"""The commands of `fastserial patches`: show, check, and make a patch for a new torch.

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
    build,
    choose,
    patch_names,
    patches_dir,
    read_patch,
    sha256,
    split_lines,
)

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
    if not (where.is_file() or where.is_dir()):  # opening a pipe would block
        raise PatchError(f"{where} holds no torch: it is neither a file nor a folder")
    try:
        root = where if where.is_dir() else zipfile.Path(where)
        version = _VERSION.search((root / "torch/version.py").read_text(encoding="utf-8"))
        text = (root / _FILE).read_text(encoding="utf-8")
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise PatchError(f"{where} holds no torch: {error}") from error
    if version is None:
        raise PatchError(f"{where}/torch/version.py does not say the version")
    return TorchSource(version[2], str(where), text)


def diff(source: TorchSource) -> str:
    """Return what our lines change as a unified diff, for `patch -p1`.

    Raises:
        PatchError: they cannot be inserted.
    """
    patch, _ = choose(source.text, source.version)
    built, _ = build(source.text, patch)
    before, after = split_lines(source.text), split_lines(built)
    return "".join(difflib.unified_diff(before, after, f"a/{_FILE}", f"b/{_FILE}"))


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
        _, functions = build(source.text, start)
    except PatchError as error:
        raise PatchError(
            f"{error}. Write an edit for it into {path} (CONTRIBUTING.md, 'A new torch release')"
        ) from error
    old = {edit.function: edit.hashes for edit in start.edits if start.name == name}
    lines = ["[sha256]\n"]
    for function in functions:
        all_ = dict.fromkeys((*old.get(function.name, ()), sha256(function.original)))
        hashes = [f'"{one}"' for one in all_]
        text = hashes[0] if len(hashes) == 1 else f"[{', '.join(hashes)}]"
        lines.append(f"{function.name} = {text}\n")
    known = (folder / f"{start.name}.toml").read_text(encoding="utf-8")
    _, head, edits = known.partition("[edits.")
    if edits:
        lines += ["\n", head, edits]
    path.write_text("".join(lines), encoding="utf-8")
    return path
