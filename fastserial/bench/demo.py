"""`fastserial demo`: a transformer, saved both ways, compared byte by byte and loaded back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fastserial.bench.compare import different_tensors
from fastserial.bench.rotation import Plan, rotate, summarize
from fastserial.bench.state import check_memory, scratch
from fastserial.bench.table import MEASURED, Column, Result, Table, size, verdict
from fastserial.bench.torch_rows import Format, fast, fast_row, stock, stock_row

__all__ = ["build_model", "run_demo"]

_FORMATS: tuple[Format, ...] = ("zip", "legacy")
_VOCABULARY, _ITEM = 50257, 4
_WIDTHS = (1024, 768, 256, 64)
_SLACK = 64 << 20


def run_demo(
    folder: Path, nbytes: int, runs: int, say: Callable[[str], None] = lambda text: None
) -> Result:
    """Save and load a model of about `nbytes` bytes; every save includes its fsync.

    Raises:
        BenchError: there is too little memory or disk.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    with fast():
        pass
    say("building the model")
    check_memory(3 * nbytes)  # the model, and two copies while loads are compared
    state = build_model(nbytes)
    rows = [
        replace(make(state, container), check=partial(_loads_as, state))
        for container in _FORMATS
        for make in (stock_row, fast_row)
    ]
    needed = 2 * sum(tensor.nbytes for tensor in state.values()) + _SLACK
    with scratch(folder, needed) as place:
        found = summarize(rotate(rows, place, Plan(runs), say))
    columns = [Column("bytes", "size", size), MEASURED[0], MEASURED[2]]
    columns += [
        Column("equal", "loads as saved", verdict),
        Column("identical", "stock's bytes", verdict),
    ]
    # lines that are easy to find, also for a program
    notes = [
        f"{container}: identical: {'yes' if Table(pair, []).right else 'no'}"
        for container, pair in zip(_FORMATS, (found[:2], found[2:]), strict=True)
    ]
    caption = (
        f"A transformer with random weights: {len(state)} tensors; every save includes its fsync; "
        f"medians of {runs} interleaved runs (least–greatest)"
    )
    settings = {"nbytes": nbytes, "runs": runs}
    return Result("demo", folder, caption, settings, [Table(found, columns)], notes=notes)


def build_model(nbytes: int) -> dict[str, torch.Tensor]:
    """Return the state dict of a transformer of GPT-2's make, about `nbytes` bytes."""
    # the widest whose embedding is not most of the model
    fitting = (w for w in _WIDTHS if 2 * w * _VOCABULARY * _ITEM <= nbytes)
    width = next(fitting, _WIDTHS[-1])
    left = nbytes - width * _VOCABULARY * _ITEM
    layers = max(1, round(left / (12 * width * width * _ITEM)))
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(_VOCABULARY, width),
            "layers": nn.ModuleList(
                nn.TransformerEncoderLayer(width, width // 64, 4 * width) for _ in range(layers)
            ),
        }
    )
    return dict(model.state_dict())


def _loads_as(state: Mapping[str, torch.Tensor], path: Path) -> bool:
    """Return whether stock torch loads a file as what was saved."""
    with stock():
        return not different_tensors(state, torch.load(path, weights_only=True))
