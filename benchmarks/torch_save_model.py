"""A model's checkpoint, saved with every writer there is, in turn, fio among them.

The model has the architecture of the name and random weights; nothing is downloaded, and the model
itself is never built. Timed is the whole call; durable rows include the fsync of file and
directory. What was written is read back, or compared byte by byte; exit status 1 if it is wrong.
"""

from __future__ import annotations

import argparse
from functools import partial

from common import Say, Script
from models import MODELS, model_state
from torch_save_tensor import add_writer_options, save_with_all

from fastserial.bench.table import Result


def _measure(options: argparse.Namespace, say: Say) -> Result:
    words = [options.model, "float16 weights" * options.half]
    words += ["Adam's states in float32" * options.optimizer]
    make = partial(
        model_state,
        options.model,
        optimizer=options.optimizer,
        half=options.half,
        device="cuda" if options.gpu else "cpu",
    )
    subject = (", ".join(filter(None, words)), make)
    return save_with_all(options, "torch_save_model", say, subject=subject)


if __name__ == "__main__":
    script = Script(__doc__, "five minutes for each GiB", {"model": "gpt2-tiny", "runs": 1})
    models = f"{', '.join(MODELS)}, or a folder with a transformers config.json"
    script.add("--model", default="gpt2", help=models)
    script.add("--optimizer", action="store_true", help="with Adam's states in float32")
    script.add("--half", action="store_true", help="weights in float16")
    add_writer_options(script)
    script.run(_measure)
