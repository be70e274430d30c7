"""Read a folder that ``write.py`` wrote: ``python read.py FOLDER stock|fast``.

Prints, as JSON, the digest of each value by file name, or the error. Zip files are read a second
time through a mapping of the file.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from support.identity import digest, fast, stock


def read(path: Path, **options: Any) -> str:
    """The digest of what a file holds, or what went wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return digest(torch.load(path, weights_only=False, **options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def read_all(folder: Path, side: str) -> dict[str, str]:
    """Read every file of a folder."""
    digests = {}
    with stock() if side == "stock" else fast():
        for path in sorted(folder.glob("*.pt")):
            digests[path.name] = read(path)
            if path.name.endswith(".zip.pt"):
                digests[f"{path.name} mapped"] = read(path, mmap=True)
    return digests


if __name__ == "__main__":
    found = read_all(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps({"torch": torch.__version__, "values": found}))
