"""Saves whose signal handler saves, too: `FOLDER FORMAT`."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

import torch
from support.children import answer, arguments, save
from support.corpus import noise
from support.identity import fast

args = arguments()
faulthandler.dump_traceback_later(60, exit=True)
folder = Path(args[0])
live = {i: noise(20_000) for i in range(300)}
depth, result = [0], {"inside": 0, "wrong": []}


def ring(*_):
    if not depth[0]:
        return
    depth[0] -= 1
    result["inside"] += 1
    save(folder / "handler.pt", args[1], live)


signal.signal(signal.SIGALRM, ring)
with fast(block_size=65536, small_file=0, durable=False):
    save(folder / "a.pt", args[1], live)
    start = time.perf_counter()
    save(folder / "a.pt", args[1], live)
    took = time.perf_counter() - start
    new = (folder / "a.pt").read_bytes()
    for step in range(60):
        (folder / "a.pt").unlink()
        depth[0] = 1
        signal.setitimer(signal.ITIMER_REAL, took * (step + 1) / 60)
        save(folder / "a.pt", args[1], live)
        depth[0] = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        if (folder / "a.pt").read_bytes() != new:
            result["wrong"].append(step)
result["names"] = sorted(os.listdir(folder))
result["same"] = len(torch.load(folder / "handler.pt")) == len(live)
answer(result)
