"""`fastserial demo`: a transformer, saved by stock torch and by fastserial, the files compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fastserial.bench.save import SaveBench, run_save
from fastserial.bench.state import check_memory
from fastserial.bench.table import Result

__all__ = ["build_model", "run_demo"]

_VOCABULARY, _ITEM = 50257, 4
_WIDTHS = (1024, 768, 256, 64)


def run_demo(
    folder: Path, nbytes: int, runs: int, say: Callable[[str], None] = lambda text: None
) -> Result:
    """Save a model of about `nbytes` bytes; every save includes its fsync.

    Raises:
        BenchError: there is too little memory or disk.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_memory(2 * nbytes)
    bench = SaveBench(
        folder, runs=runs, overwriting=False, loose=False, with_engines=False, with_fio=False
    )
    subject = "a transformer with random weights", partial(build_model, nbytes)
    found = run_save(bench, say, benchmark="demo", subject=subject)
    rows = {row["name"]: row for row in found.tables[0].rows}
    found.missing = {}
    found.notes = [  # lines that are easy to find, also for a program
        f"{container}: identical: {'yes' if rows[f'fastserial {container}']['identical'] else 'no'}"
        for container in bench.formats
    ]
    return found


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
