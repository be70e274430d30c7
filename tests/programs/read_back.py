"""Save with `verify` to a file that its owner may write, but not read; the argument is the file."""

import os
import sys

import torch

import fastserial

path = sys.argv[1]
try:
    open(path, "rb").close()
except PermissionError:
    print("refused")
fastserial.install(read_back=True, small_file=0, block_size=65536, queue_depth=2)
value = torch.arange(300_000)


def saved(target) -> str:
    torch.save({"a": value}, target)
    report = fastserial.last_save_report()
    os.chmod(path, 0o600)
    assert torch.equal(torch.load(path)["a"], value)
    os.chmod(path, 0o200)
    return str(report.fallback).partition(":")[0]


print(saved(path))
with open(path, "wb") as file:
    print(saved(file))
