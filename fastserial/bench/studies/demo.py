"""`fastserial demo`: a real model, saved both ways, compared byte by byte and loaded back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import different_tensors, first_difference
from fastserial.bench.measuring.machine import describe_folder, this_machine
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.summary import Spread, paired
from fastserial.bench.measuring.units import MB
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
_PAUSE = 0.3
_SLACK = 64 << 20


@dataclass(slots=True)
class _Comparison:
    """One container: the samples of both sides, and every difference that was found."""

    container: Format
    stock: list[Sample] = field(default_factory=list)
    fast: list[Sample] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def run_demo(folder: Path, nbytes: int, runs: int) -> bool:
    """Run the demo, print its table, and tell whether everything is identical.

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
        with scratch(folder, 2 * size + _SLACK) as place:
            compared = [_compare(state, one, place, runs, status.update) for one in _FORMATS]
    console.print(str(this_machine()), soft_wrap=True)
    console.print(describe_folder(probe_folder(folder)), markup=False, soft_wrap=True)
    console.print(
        f"GPT-2 with random weights: {len(state)} tensors; every save includes its fsync; medians "
        f"of {runs} interleaved runs (least–greatest)",
        soft_wrap=True,
    )
    _show(compared, console)
    return not any(one.differences for one in compared)


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
            "the demo builds its model with transformers: pip install 'fastserial[bench]'"
        ) from error
    # the widest whose embedding is not most of the model
    fitting = (w for w in _WIDTHS if 2 * w * _VOCABULARY * _ITEM <= nbytes)
    width = next(fitting, _WIDTHS[-1])
    left = nbytes - width * _VOCABULARY * _ITEM
    layers = max(1, round(left / (12 * width * width * _ITEM)))
    torch.manual_seed(0)
    shape = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64)
    return cast("dict[str, torch.Tensor]", GPT2LMHeadModel(shape).state_dict())


def _compare(
    state: Mapping[str, torch.Tensor],
    container: Format,
    place: Path,
    runs: int,
    say: Callable[[str], None],
) -> _Comparison:
    found = _Comparison(container)
    sides = (
        (stock_row(state, container), found.stock),
        (fast_row(state, container), found.fast),
    )
    for turn in range(runs + 1):  # the first is a warm-up
        # one stem: a zip's bytes depend on it
        paths = [place / f"model.{turn}-{side}" for side in ("stock", "fast")]
        for path, (row, samples) in zip(paths, sides, strict=True):
            say(f"{container}, run {turn}/{runs}: {row.name}")
            settle(_PAUSE)
            sample = row.run(path)
            if turn:
                samples.append(sample)
        say(f"{container}, run {turn}/{runs}: comparing the files")
        at = first_difference(*paths)
        if at is not None:
            found.differences.append(f"{container}, run {turn}: the files differ at byte {at}")
        if turn == runs:
            say(f"{container}: loading both files with stock torch")
            found.differences += _compare_loaded(state, container, paths)
        for path in paths:
            path.unlink()
    return found


def _compare_loaded(
    state: Mapping[str, torch.Tensor], container: str, paths: list[Path]
) -> list[str]:
    with stock():
        loaded: list[Any] = [torch.load(path, weights_only=True) for path in paths]
    return [
        f"{container}: {side} loads with another {name}"
        for side, back in zip(("stock's file", "fastserial's file"), loaded, strict=True)
        for name in different_tensors(state, back)
    ]


def _show(compared: list[_Comparison], console: Console) -> None:
    table = Table("", "size", "MB/s stock", "MB/s fastserial", "× stock", "identical")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in compared:
        ratio = paired(one.fast, one.stock)
        table.add_row(
            one.container,
            format_bytes(one.fast[-1].nbytes),
            _speed(one.stock),
            _speed(one.fast),
            f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
            "no" if one.differences else "yes",
        )
    console.print(table)
    for one in compared:
        for text in one.differences:
            console.print(f"[red]{text}[/red]", soft_wrap=True)
        # a line that is easy to find, also for a program
        console.print(f"{one.container}: identical: {'no' if one.differences else 'yes'}")


def _speed(samples: list[Sample]) -> str:
    spread = Spread.of(sample.bandwidth / MB for sample in samples)
    return f"{spread.median:,.0f} ({spread.low:,.0f}–{spread.high:,.0f})"
