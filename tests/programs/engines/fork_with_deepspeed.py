"""Saves with the deepspeed engine before a fork, in the child, and after it: `FOLDER`."""

import os
import sys
from pathlib import Path

import torch

import fastserial

torch.set_num_threads(1)  # OpenMP does not survive a fork
fastserial.install(engine="deepspeed", small_file=0, block_size=65536)
path = Path(sys.argv[1])
torch.save(torch.ones(100_000), path / "parent.pt")
child = os.fork()
if child == 0:
    torch.save(torch.zeros(100_000), path / "child.pt")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
torch.save(torch.ones(100_000), path / "again.pt")
assert fastserial.last_save_report().engine == "deepspeed"
for name, value in ("parent", 1), ("child", 0), ("again", 1):
    assert torch.load(path / f"{name}.pt").eq(value).all()
