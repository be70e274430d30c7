"""A daemon thread saves while the interpreter ends: `daemon.py PATH`."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

import fastserial
from fastserial.engines.threads import ThreadsEngine

inside = threading.Event()


class Endless(ThreadsEngine):
    """Does not come to an end."""

    def submit(self, requests: Any) -> None:
        inside.set()
        time.sleep(60)


def save() -> None:
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    with fastserial.options(engine=Endless, small_file=0):
        fastserial.save_async(torch.zeros(100_000), sys.argv[1])


def stay() -> None:
    inside.wait(60)


fastserial.save_async([1], sys.argv[1] + ".first").wait()
threading.Thread(target=save, daemon=True).start()
threading.Thread(target=stay).start()  # the interpreter waits for it
