"""Saves again and again: `many_saves.py FOLDER COUNT BUDGET SIZE`; prints JSON.

SIZE: about so many MiB are saved.

`first` and `last`: the most bytes resident after a save of the first half, and of the last quarter;
`peak`: the most beyond what there was before; `state`: bytes of the file; `open`: descriptors that
are open more at the end; `threads`: likewise.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from support.limits import status

import fastserial

FOLDER, COUNT, BUDGET, SIZE = Path(sys.argv[1]), *map(int, sys.argv[2:5])
WIDTH = 2000  # a weight has 15 MiB, and a momentum as large


def main() -> None:
    torch.set_num_threads(1)
    count = -(-SIZE // (2 * WIDTH * WIDTH * 4 >> 20))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, Any] = {}
    resident: list[int] = []

    def step() -> None:
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    with fastserial.options(durable=False):
        fastserial.save_async([1], FOLDER / "first.pt").wait()
    step()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    opened = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(COUNT):
        with fastserial.options(durable=False):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saving = fastserial.save_async(state, FOLDER / "state.pt", snapshot_budget=BUDGET)
        step()
        report = saving.wait()
        gc.collect()
        resident.append(status("VmRSS"))
    until = time.monotonic() + 5  # the last thread may be about to end
    while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < until:
        time.sleep(0.01)
    found |= {
        "first": max(resident[: COUNT // 2]),
        "last": max(resident[-COUNT // 4 :]),
        "peak": status("VmHWM") - before,
        "state": report.bytes,
        "open": len(os.listdir("/proc/self/fd")) - opened,
        "threads": len(os.listdir("/proc/self/task")) - threads,
    }
    print(json.dumps(found))


main()
