"""Ctrl-C at many moments of a save: `FOLDER FORMAT replaced|open COUNT`.

open: the file is kept open, so that it is overwritten and not replaced.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from support.children import answer, arguments, save
from support.corpus import noise
from support.identity import fast

args = arguments()


def ring(*_):
    raise KeyboardInterrupt


signal.signal(signal.SIGALRM, ring)
path = Path(args[0], "a.pt")
live = noise(12_000_000)
result = {"interrupted": 0, "finished": 0, "wrong": []}
with fast(block_size=65536, threads=2, small_file=0, durable=False):
    save(path, args[1], live)  # how long it takes, and what it gives
    start = time.perf_counter()
    save(path, args[1], live)
    took = time.perf_counter() - start
    new = path.read_bytes()
    kept = path.open("rb") if args[2] == "open" else None
    for step in range(int(args[3])):
        path.write_bytes(b"old")
        error = None
        try:
            signal.setitimer(signal.ITIMER_REAL, took * (step + 1) / int(args[3]))
            save(path, args[1], live)
            signal.setitimer(signal.ITIMER_REAL, 0)
            result["finished"] += 1
        except KeyboardInterrupt:
            result["interrupted"] += 1
        except BaseException as other:
            error = repr(other)
        names = os.listdir(args[0])
        if error or names != ["a.pt"] or path.read_bytes() not in (b"old", new):
            result["wrong"].append([step, error, names])
        for name in names:
            if name != "a.pt":
                os.unlink(path.with_name(name))
    save(path, args[1], live)
    assert path.read_bytes() == new
answer(result)
