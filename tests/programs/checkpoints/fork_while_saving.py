"""Forks while another thread saves, and saves in the children: `FOLDER FORMAT`."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from support.corpus import noise
from support.identity import SMALL, fast, raised, save
from support.processes import answer

args = sys.argv[1:]
stop, errors = threading.Event(), []
small = {i: noise(20_000) for i in range(100)}
big, folder = {"t": noise(6_000_000), **small}, Path(args[0])
want = {**SMALL, **small}


def run():
    while not stop.is_set():
        errors.append(raised(lambda: save(folder / "parent.pt", args[1], big)))


with fast(small_file=0, block_size=65536, durable=False):
    save(folder / "parent.pt", args[1], big)
    thread = threading.Thread(target=run)
    thread.start()
    codes = []
    for i in range(8):
        time.sleep(0.013 * (i + 1))
        pid = os.fork()
        if not pid:
            error = raised(save, folder / f"child{i}.pt", args[1], want)
            os._exit(0 if error is None else 1)
        deadline = time.monotonic() + 30
        while (waited := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.005)
        if waited == (0, 0):
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            codes.append("hangs")
        else:
            codes.append(os.waitstatus_to_exitcode(waited[1]))
    stop.set()
    thread.join()
result = {"codes": codes, "errors": [str(e) for e in errors if e], "saves": len(errors)}
answer(result)
