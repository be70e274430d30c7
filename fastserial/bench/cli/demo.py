"""`fastserial demo`: a real model, saved both ways, compared byte by byte and loaded back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import different_tensors
from fastserial.bench.measuring.machine import describe_folder, this_machine
from fastserial.bench.measuring.rotation import Plan, rotate
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.summary import Line, summarize
from fastserial.bench.measuring.units import MB
from fastserial.bench.presenting.save_view import (
    UNKNOWN,
    format_ratio,
    format_spread,
    table_of,
)
from fastserial.bench.subjects.payload import check_memory
from fastserial.bench.subjects.saving import Format, check_torch, stock
from fastserial.bench.subjects.torch_rows import fast_row, stock_row
from fastserial.console import new_console
from fastserial.diagnosis.folder import probe_folder
from fastserial.reports import format_bytes

__all__ = ["build_model", "run_demo"]

_FORMATS: tuple[Format, ...] = ("zip", "legacy")
_VOCABULARY, _ITEM = 50257, 4
_WIDTHS = (1024, 768, 256, 64)
_SLACK = 64 << 20


def run_demo(folder: Path, nbytes: int, runs: int) -> bool:
    """Run the demo, print its table, and return whether everything is identical.

    Raises:
        BenchError: transformers is missing, or there is too little memory or disk.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_torch()
    console = new_console()
    with console.status("building the model") as status:
        check_memory(3 * nbytes)  # the model, and two copies while loads are compared
        state = build_model(nbytes)
        size = sum(tensor.nbytes for tensor in state.values())
        rows = [
            replace(make(state, container), check=partial(_loads_as, state))
            for container in _FORMATS
            for make in (stock_row, fast_row)
        ]
        with scratch(folder, 2 * size + _SLACK) as place:
            lines = summarize(rotate(rows, place, Plan(runs), status.update))
    console.print(str(this_machine()), soft_wrap=True)
    console.print(describe_folder(probe_folder(folder)), markup=False, soft_wrap=True)
    console.print(
        f"GPT-2 with random weights: {len(state)} tensors; every save includes its fsync; medians "
        f"of {runs} interleaved runs (least–greatest)",
        soft_wrap=True,
    )
    return _show(lines, console)


def build_model(nbytes: int) -> dict[str, torch.Tensor]:
    """Return the state dict of a GPT-2 of about `nbytes` bytes with random weights.

    Raises:
        BenchError: transformers is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be downloaded
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise BenchError(
            "the demo builds its model with transformers: pip install transformers"
        ) from error
    # the widest whose embedding is not most of the model
    fitting = (w for w in _WIDTHS if 2 * w * _VOCABULARY * _ITEM <= nbytes)
    width = next(fitting, _WIDTHS[-1])
    left = nbytes - width * _VOCABULARY * _ITEM
    layers = max(1, round(left / (12 * width * width * _ITEM)))
    torch.manual_seed(0)
    shape = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64)
    return cast("dict[str, torch.Tensor]", GPT2LMHeadModel(shape).state_dict())


def _loads_as(state: Mapping[str, torch.Tensor], path: Path) -> bool:
    """Return whether stock torch loads a file as what was saved."""
    with stock():
        return not different_tensors(state, torch.load(path, weights_only=True))


def _show(lines: Sequence[Line], console: Console) -> bool:
    """Print stock's line and ours for each format; return whether all is identical."""
    table = table_of("", "size", "MB/s", "× stock", "loads as saved", "stock's bytes")
    words = {None: UNKNOWN, True: "yes", False: "[red]NO[/red]"}
    for line in lines:
        table.add_row(
            line.name,
            format_bytes(line.nbytes),
            format_spread(line.bandwidth, MB),
            format_ratio(line.to_stock),
            words[line.equal],
            words[line.identical],
        )
    console.print(table)
    right = [one.right and two.right for one, two in zip(lines[::2], lines[1::2], strict=True)]
    for container, same in zip(_FORMATS, right, strict=True):
        # a line that is easy to find, also for a program
        console.print(f"{container}: identical: {'yes' if same else 'no'}")
    return all(right)
