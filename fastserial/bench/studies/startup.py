"""What `import fastserial` and `install()` add to `import torch`, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fastserial
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.summary import Spread
from fastserial.startup import VARIABLE

__all__ = ["Startup", "measure_startup"]

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


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds of `import torch`, of what fastserial adds, and the ratio of the two."""

    torch: Spread
    added: Spread
    ratio: Spread


def measure_startup(runs: int, say: Callable[[str], None]) -> Startup:
    """Start Python `runs` times, after one warm-up.

    Raises:
        BenchError: a process failed.
    """
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    where = str(Path(fastserial.__file__).resolve().parent.parent)
    pairs = []
    for turn in range(runs + 1):
        say(f"starting Python, {turn}/{runs}")
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, where],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"a fresh Python failed: {done.stderr.strip()}")
        pairs.append(json.loads(done.stdout))
    counted = pairs[1:]
    return Startup(
        Spread.of(torch for torch, _ in counted),
        Spread.of(added for _, added in counted),
        Spread.of(added / torch for torch, added in counted),
    )
