"""One side of an exchange: ``python side.py FOLDER stock|fast write|read|save|load``.

write, read: the portable part of the corpus; zip files are read a second time through a mapping.
save, load: a folder of torch.distributed.checkpoint. Prints, as JSON, the digest of each value by
its name, or the error.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from support.corpus import CASES
from support.identity import digest, fast, saver, stock

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
SHAPES = {"large": (700, 1000), "small": (3, 5), "scalar": (), "empty": (0, 4)}


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


def digest_of(path: Path, **options: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return digest(torch.load(path, weights_only=False, **options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def read(folder: Path, side: str) -> dict[str, str]:
    digests = {}
    with stock() if side == "stock" else fast():
        for path in sorted(folder.glob("*.pt")):
            digests[path.name] = digest_of(path)
            if path.name.endswith(".zip.pt"):
                digests[f"{path.name} mapped"] = digest_of(path, mmap=True)
    return digests


def state_of(blank: bool) -> dict[str, Any]:
    """A nested state, or one of the same shapes to load into."""
    generator = torch.Generator().manual_seed(0)
    model = {}
    for dtype in DTYPES:
        for name, shape in SHAPES.items():
            values = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator)
            model[f"{name}.{dtype}"] = (values * (not blank)).to(dtype)
    model["turned"] = model["large.torch.float32"].t()  # not contiguous
    return {"model": model, "step": 0 if blank else 7, "names": [] if blank else ["a", "é"]}


def shards(folder: Path, side: str, load: bool) -> dict[str, str]:
    state, ours = state_of(load), {}
    if side == "fast":
        from fastserial import distributed

        name = "Load" if load else "Save"
        ours["planner"] = getattr(distributed, f"Fast{name}Planner")()
    if load:
        reader = distributed.FastStorageReader if ours else dcp.FileSystemReader
        dcp.load(state, storage_reader=reader(folder), **ours)
    else:
        writer = distributed.FastStorageWriter if ours else dcp.FileSystemWriter
        dcp.save(state, storage_writer=writer(folder), **ours)
    found = {key: digest(value) for key, value in state["model"].items()}
    return {**found, "step": repr(state["step"]), "names": repr(state["names"])}


def main(folder: str, side: str, what: str) -> None:
    if what in ("save", "load"):
        values = shards(Path(folder), side, what == "load")
    else:
        values = (write if what == "write" else read)(Path(folder), side)
    print(json.dumps({"torch": torch.__version__, "values": values}))


if __name__ == "__main__":
    main(*sys.argv[1:])
