"""Ends while a save is under way: `leave.py PATH uncaught|failing|fork`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

import fastserial
from fastserial.engines.threads import ThreadsEngine

PATH, HOW = sys.argv[1:]


class Slow(ThreadsEngine):
    """Takes a quarter of a second for each block; fails if it is to."""

    name = "slow"

    def submit(self, requests: Any) -> None:
        time.sleep(0.25)
        if HOW == "failing":
            raise OSError(5, "it was made to fail")
        super().submit(requests)


def fork(saving: fastserial.PendingSave) -> None:
    child = os.fork()
    if not child:
        error = saving.exception(10)
        assert isinstance(error, fastserial.FastserialError)
        fastserial.save_async([1], f"{PATH}.child").wait(10)
        print("child", flush=True)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    saving.wait(60)
    print("saved")


def main() -> None:
    with fastserial.options(engine=Slow, small_file=0, block_size=1 << 20, durable=False):
        saving = fastserial.save_async({"x": torch.full((500_000,), 7.0)}, PATH)
    if HOW == "uncaught":
        raise RuntimeError("nobody catches this")
    if HOW == "fork":
        fork(saving)


main()
