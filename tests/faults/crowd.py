"""Many saves at once, or one after the other, in a process of their own.

python crowd.py FOLDER THREADS SAVES SEED [stock]    # overlapping targets
python crowd.py FOLDER soak SAVES             # JSON lines of memory, descriptors, threads
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import sys
import threading
from pathlib import Path

import pytest
import torch
from states import make

import fastserial

TARGETS = ("a.pt", "b.pt", "legacy.pt")
_SIZES = (3_000, 200_000, 3_000_000)
_WARM_UP = 100


def _crowd(folder: Path, threads: int, saves: int, seed: int) -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        dice = random.Random(seed * 1000 + index)
        try:
            for count in range(saves):
                name = dice.choice(TARGETS)
                number = (seed * 100 + index) * 100_000 + count
                state = make(number, dice.choice(_SIZES))
                torch.save(state, folder / name, _use_new_zipfile_serialization=name != "legacy.pt")
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def _state_of_process() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def _soak(folder: Path, saves: int) -> None:
    states = {size: make(1, size) for size in (*_SIZES, 9_000_000)}
    for count in range(saves):
        size = list(states)[count % len(states)]
        zipped = count % 3 != 0
        target = folder / ("a.pt" if zipped else "legacy.pt")
        if count % 10 == 9:  # what goes wrong must not add up either
            with pytest.raises(Exception, match=r"(?i)pickle"):
                torch.save({**states[size], "no": lambda: None}, target)
        elif count % 10 == 8:
            with open(target, "wb") as file:
                torch.save(states[size], file, _use_new_zipfile_serialization=zipped)
        elif count % 10 == 7:
            torch.save(states[size], io.BytesIO(), _use_new_zipfile_serialization=zipped)
        else:
            torch.save(states[size], target, _use_new_zipfile_serialization=zipped)
        if count >= _WARM_UP and count % 50 == 0:
            sys.stdout.write(json.dumps({"saves": count, **_state_of_process()}) + "\n")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if sys.argv[-1] != "stock":
        fastserial.install()
    if sys.argv[2] == "soak":
        _soak(folder, int(sys.argv[3]))
    else:
        _crowd(folder, *map(int, sys.argv[2:5]))


if __name__ == "__main__":
    main()
