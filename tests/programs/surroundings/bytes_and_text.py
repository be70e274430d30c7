"""Everything that reads a checkpoint, under `python -bb`; the argument is an empty folder."""

import sys
from pathlib import Path

import torch

import fastserial

folder = Path(sys.argv[1])
fastserial.install(small_file=0, block_size=65536)
state = {"a": torch.arange(100_000), b"raw": b"bytes"}
for use_zip in (True, False):
    path = folder / f"{use_zip}.pt"
    torch.save(state, path, _use_new_zipfile_serialization=use_zip)
    torch.load(path, weights_only=False)
    with open(path, "rb") as file:
        torch.load(file, weights_only=False)
    fastserial.inspect(path)
    assert fastserial.verify(path).ok
    with fastserial.open(path) as file:
        file.get_tensor("a")
    fastserial.load_into({"a": torch.empty(100_000, dtype=torch.int64)}, path)
    other = folder / f"other-{use_zip}.pt"
    fastserial.convert(path, other, to="legacy" if use_zip else "zip")
print("ok")
