"""A function that torch.compile compiles saves, in two graphs: `[MODULE]` is imported before."""

from __future__ import annotations

import importlib
import sys

import torch

import fastserial

if sys.argv[1]:
    importlib.import_module(sys.argv[1])
fastserial.install()
graphs: list[str] = []


def backend(module, inputs):
    graphs.append(module.code)
    return module


@torch.compile(backend=backend)
def step(x):
    y = x + 1
    torch.save({"y": y}, "a.pt")
    torch.save({"y": y}, "b.pt", _use_new_zipfile_serialization=False)
    return y * 2


assert step(torch.ones(4)).tolist() == [4.0] * 4
for path in ("a.pt", "b.pt"):
    assert torch.load(path)["y"].tolist() == [2.0] * 4
assert len(graphs) == 2, graphs
trace_rules = importlib.import_module("torch._dynamo.trace_rules")
assert trace_rules.check(fastserial.patching.save_hooks.open_zip_writer)
assert trace_rules.check(torch.serialization._save)
