"""What spawned processes tell of themselves; they import it by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

import fastserial
from fastserial.distributed import FastStorageWriter


def tell(path: str) -> None:
    """Add to a file: this process, and whether torch is patched in it."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()} {fastserial.installed()}\n")


def told(path: Path) -> dict[int, bool]:
    """Return what processes told."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {int(process): installed == "True" for process, installed in lines}


class TellingWriter(FastStorageWriter):
    """Tells in which process it writes: in a file beside its folder."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        tell(f"{self.path}.told")
        return super().write_data(plan, planner)


class TellingStockWriter(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        tell(f"{self.path}.told")
        return super().write_data(plan, planner)
