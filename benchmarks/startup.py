"""What `import fastserial` and `install()` add to `import torch`, in fresh processes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from common import Picture, Say, Script

import fastserial
from fastserial.bench.measure import BenchError
from fastserial.bench.rotation import Spread
from fastserial.bench.table import Column, Result, Table, number
from fastserial.startup import VARIABLE

# Appended, so that nothing beside fastserial changes where the other imports come from.
_PROGRAM = """
import sys, time
sys.path.append(sys.argv[1])
began = time.perf_counter()
import torch
middle = time.perf_counter()
import fastserial
fastserial.install(strict=True)
print([middle - began, time.perf_counter() - middle])
"""


def _measure(options: argparse.Namespace, say: Say) -> Result:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    where = str(Path(fastserial.__file__).resolve().parent.parent)
    pairs = []
    for turn in range(options.runs + 1):  # the first is a warm-up
        say(f"starting Python, {turn}/{options.runs}")
        command = [sys.executable, "-c", _PROGRAM, where]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"a fresh Python failed: {done.stderr.strip()}")
        pairs.append(json.loads(done.stdout))
    torchs, added = zip(*pairs[1:], strict=True)
    rows = [
        {"name": "import torch", "seconds": Spread.of(torchs)},
        {"name": "import fastserial, and install()", "seconds": Spread.of(added)},
    ]
    ratio = Spread.of(mine / theirs for theirs, mine in pairs[1:])
    rows[1]["to_torch"] = ratio
    columns = [Column("seconds", "ms", number(1e-3)), Column("to_torch", "÷ torch", number(1, 3))]
    caption = f"medians of {options.runs} runs (least–greatest), each in a process of its own"
    return Result("startup", options.folder, caption, {}, [Table(rows, columns)])


if __name__ == "__main__":
    picture = Picture("seconds", "ms", 1e-3)
    Script(__doc__, "half a minute", {"runs": 1}, picture).run(_measure)
