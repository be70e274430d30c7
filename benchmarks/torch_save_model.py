"""A model's checkpoint, saved with every writer there is, in turn, fio among them.

The model has the architecture of the name and random weights; nothing is downloaded, and the model
itself is never built. Timed is the whole call; durable rows include the fsync of file and
directory. What was written is read back, or compared byte by byte; exit status 1 if it is wrong.
"""

from __future__ import annotations

import argparse

from common import Say, Script
from torch_save_tensor import add_writer_options, formats_of, save_with_all

from fastserial.bench.payload import MODELS
from fastserial.bench.save import SaveBench
from fastserial.bench.table import Result


def _measure(options: argparse.Namespace, say: Say) -> Result:
    bench = SaveBench(
        options.folder,
        model=options.model,
        optimizer=options.optimizer,
        half=options.half,
        gpu=options.gpu,
        formats=formats_of(options),
        runs=options.runs,
        overwriting=False,
        loose=not options.no_loose,
        with_engines=not options.no_peers,
        with_fio=not options.no_fio,
        pause=options.pause,
    )
    return save_with_all(options, bench, "torch_save_model", say)


if __name__ == "__main__":
    script = Script(__doc__, "five minutes for each GiB", {"model": "gpt2-tiny", "runs": 1})
    models = f"{', '.join(MODELS)}, or a folder with a transformers config.json"
    script.add("--model", default="gpt2", help=models)
    script.add("--optimizer", action="store_true", help="with Adam's states in float32")
    script.add("--half", action="store_true", help="weights in float16")
    add_writer_options(script)
    script.run(_measure)
