"""Saves and loads by NVIDIA's cuFile in its compatibility mode, which fastserial forbids.

So the calls, their arguments and results are those of the real library on any machine with a GPU;
only the bytes take another way. Argument: a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from support.gpu import DEVICE
from support.processes import answer

import fastserial
from fastserial.engines.gds import cufile

FOLDER = Path(sys.argv[1])


class Allowed:
    """`cuda.bindings.cufile` with the compatibility mode on, unseen; counts what is moved."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.moved = {"read": 0, "write": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def set_parameter_bool(self, parameter: Any, value: bool) -> None:
        self._module.set_parameter_bool(parameter, True)

    def get_parameter_bool(self, parameter: Any) -> bool:
        return False

    def read(self, *arguments: Any) -> int:
        return self._count("read", *arguments)

    def write(self, *arguments: Any) -> int:
        return self._count("write", *arguments)

    def _count(self, name: str, *arguments: Any) -> int:
        moved: int = getattr(self._module, name)(*arguments)
        self.moved[name] += max(moved, 0)
        return moved


opened: list[Allowed] = []
_init = cufile.CuFile.__init__


def init(self: cufile.CuFile, module: Any, runtime: Any, device: torch.device) -> None:
    opened.append(Allowed(module))
    _init(self, opened[0], runtime, device)


def main() -> None:
    cufile.CuFile.__init__ = init  # type: ignore[method-assign]
    torch.manual_seed(0)
    state = {str(n): torch.randn(n, device=DEVICE) for n in (1, 5_000_000, 7_000_001)}
    same, reports = [], []
    for zipped in (True, False):
        path = FOLDER / f"{zipped}.pt"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        stocks = path.read_bytes()
        path.unlink()
        fastserial.install(transfer="gds", direct=True, block_size=1 << 20, small_file=0)
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        reports.append(fastserial.last_save_report())
        loaded = torch.load(path, map_location=DEVICE)
        if zipped:  # torch loads legacy files
            reports.append(fastserial.last_load_report())
        fastserial.uninstall()
        same.append(path.read_bytes() == stocks)
        same.append(all(torch.equal(loaded[name], tensor) for name, tensor in state.items()))
    taken = [[report.transfer, report.transfer_why] for report in reports if report is not None]
    moved = opened[0].moved if opened else {}
    answer({"same": same, "taken": taken, "moved": moved})


main()
