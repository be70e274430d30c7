"""Write the portable part of the corpus: ``python write.py FOLDER stock|fast``.

Prints, as JSON, the digest of each value by file name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from support.corpus import CASES
from support.identity import digest, fast, saver, stock


def write(folder: Path, side: str) -> dict[str, str]:
    """Save every case that other releases can read; return the digests of what was saved."""
    digests = {}
    for case in CASES.values():
        if not case.portable or case.missing():
            continue
        for fmt in set(case.loads) & set(case.formats) - set(case.raises):
            live = case.build()
            name = f"{case.name}.{fmt}.pt"
            with stock() if side == "stock" else fast(small_file=0):
                saver(case, fmt, live)(folder / name)
            digests[name] = digest(live)
    return digests


if __name__ == "__main__":
    written = write(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps({"torch": torch.__version__, "values": written}))
