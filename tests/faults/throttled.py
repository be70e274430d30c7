"""One load or save in a process of its own: `throttled.py save|load stock|fastserial FILE TENSORS`.

It waits for a line once torch is there, says so, does it when the next line comes, and tells the
seconds: so that several start at once.
"""

from __future__ import annotations

import sys
import time

import torch

import fastserial

_NUMBERS = 1_000_000  # of 4 bytes, in each


def main(what: str, how: str, path: str, tensors: str) -> None:
    if how == "fastserial":
        fastserial.install()
    state = [torch.rand(_NUMBERS) for _ in range(int(tensors))] if what == "save" else []
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        if what == "save":
            torch.save(state, path)
        else:
            torch.load(path)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
