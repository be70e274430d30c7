"""Saves over and over until something happens to it. Argument: a JSON object; see `JOB`.

Prints `start N` and `done N` around each save, or `error ...`. Imported as a module, by a process
that forks victims, it installs fastserial and saves once in each way.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from states import make

import fastserial
from fastserial.files import destination

JOB: dict[str, Any] = {
    "path": "",
    "first": 1,  # the states are `first`, `first + 1`, ...
    "count": 1,
    "nbytes": 0,  # of a state
    "zipped": True,
    "options": {},  # of fastserial
    "frozen": 0,  # bytes that all states have in common; each save has the one before as base
    "named": False,  # a temporary file with a name
    "pause": False,  # waits for SIGUSR1 before the first save
    "report": False,  # prints the SaveReport
    "targets": [],  # names of files in the folder `path`: `threads` threads save to any of them
    "threads": 1,
    # for controls:
    "unguarded": False,  # overwrites the target where it is: the victim holds it open
    "deaf": False,  # takes every write for a whole one
    "stock": False,  # stock torch saves
}
_SMALL_FILE = 1 << 20  # states of a few MiB go the way of large ones
_FAILED = 3


def prepare() -> None:
    """Save once in each way, so that what the first save imports is there."""
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    fastserial.install()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        fastserial.options(small_file=_SMALL_FILE, cache="drop"),
    ):
        for nbytes in (4_000, 3_000_000):
            for zipped in (True, False):
                path = os.path.join(folder, "x.pt")
                torch.save(make(1, nbytes), path, _use_new_zipfile_serialization=zipped)


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def take_every_write_for_a_whole_one() -> None:
    pwrite = os.pwrite

    def deaf_pwrite(fd: int, data: memoryview, offset: int) -> int:
        pwrite(fd, data, offset)
        return len(data)

    os.pwrite = deaf_pwrite


def arrange(job: dict[str, Any]) -> None:
    """Set what is to be otherwise."""
    if job["named"]:
        destination._can_link = lambda: False
    if job["deaf"]:
        take_every_write_for_a_whole_one()
    if job["stock"]:
        fastserial.uninstall()


def described(error: Exception) -> dict[str, Any]:
    return {
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "errno": getattr(error, "errno", None),
        "filename": getattr(error, "filename", None),
        "text": str(error),
        "needed": getattr(error, "bytes_needed", None),
        "free": getattr(error, "bytes_free", None),
    }


def save_to_any(job: dict[str, Any]) -> None:
    """Save states of three sizes to files that other threads and processes save to."""
    torch.set_num_threads(1)  # at their first operation threads may race for the pool's size

    def work(thread: int) -> None:
        first = job["first"] + 1000 * thread
        dice = random.Random(first)
        for number in range(first, first + job["count"]):
            name = dice.choice(job["targets"])
            state = make(number, dice.choice((3_000, 200_000, 3_000_000)))
            path, zipped = os.path.join(job["path"], name), name != "legacy.pt"
            torch.save(state, path, _use_new_zipfile_serialization=zipped)

    with ThreadPoolExecutor(job["threads"]) as pool:
        list(pool.map(work, range(job["threads"])))


def main() -> None:
    job = {**JOB, **json.loads(sys.argv[1])}
    arrange(job)
    if job["targets"]:
        save_to_any(job)
        return
    state = make(job["first"], job["nbytes"])
    if job["pause"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        tell("ready")
        signal.sigwait([signal.SIGUSR1])
    for number in range(job["first"], job["first"] + job["count"]):
        if number != job["first"]:
            state = make(number, job["nbytes"])
        tell(f"start {number}")
        try:
            chosen = {"small_file": _SMALL_FILE, "cache": "drop", **job["options"]}
            path: Any = contextlib.nullcontext(job["path"])
            with (
                fastserial.options(**chosen),
                open(job["path"], "wb") if job["unguarded"] else path as place,
            ):
                if job["frozen"]:
                    whole = {"frozen": torch.arange(job["frozen"] // 8), **state}
                    fastserial.save(whole, job["path"], base=job["path"])
                else:
                    torch.save(state, place, _use_new_zipfile_serialization=job["zipped"])
        except Exception as error:
            tell(f"error {json.dumps(described(error))}")
            os._exit(_FAILED)
        tell(f"done {number}")
        if job["report"]:
            report = fastserial.last_save_report()
            tell(f"report {json.dumps(report.to_dict() if report else None)}")
    os._exit(0)


if __name__ == "__main__":
    main()
else:
    prepare()
