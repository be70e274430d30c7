"""Saves or loads while the interpreter shuts down.

    python at_exit.py PATH save|load|half stock|fast

save, load: in `__del__` of a trainer that an uncaught error keeps alive.
half: closes a writer whose threads were started before.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils.serialization.config  # by torch's first save, which 3.14 cannot do any more

import fastserial

PATH, WHAT, SIDE = sys.argv[1:]
STATE = {str(i): torch.full((100_000,), float(i)) for i in range(10)}


class Trainer:
    def __init__(self) -> None:
        self.state, self.path, self.done = STATE, PATH, print
        self.save, self.load, self.shutting_down = torch.save, torch.load, sys.is_finalizing
        self.held: Any = None
        if WHAT == "half":
            self.held = fastserial.FastFileWriter(PATH)
            self.held.write(bytes(2_000_000))

    def __del__(self) -> None:
        if not self.shutting_down():
            return
        if self.held is None and WHAT == "save":
            self.save(self.state, self.path)
        elif self.held is None:
            self.load(self.path)
        else:
            self.held.close()
        self.done("done", flush=True)


def train() -> None:
    trainer = Trainer()
    raise RuntimeError(f"the trainer lives on: {trainer.path}")


if SIDE == "fast":
    fastserial.install(small_file=65536, block_size=65536)
train()
