"""`fastserial bench load` with the loaders of other packages beside it.

Timed is the load into new memory, of loaders that map the file with a touch of each page or a
copy. Each load is in a process of its own, cold (nothing of the file in the page cache) and warm,
and what it loads is compared with what was saved; exit status 1 if it differs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Say, Script, size
from peers import dcp_read, dcp_write

from fastserial.bench.load import TEMPERATURES, LoadBench, Reader, run_load
from fastserial.bench.table import Result
from fastserial.bench.torch_rows import stock

State = dict[str, torch.Tensor]
_PAGE = 4096


def _peers(state: State, saved: Path, device: str) -> tuple[list[Reader], dict[str, str]]:
    """Write the state with safetensors and DCP, and return what loads it; stock's mmap, too."""
    path, directory = saved.with_name("checkpoint.safetensors"), saved.with_name("dcp")
    missing: dict[str, str] = {}
    dcp_write(state, directory)
    parts = tuple(sorted(directory.glob("*.distcp")))
    load_dcp = partial(_dcp, directory)
    found = [
        Reader("stock zip, mmap, touched", (saved,), partial(_mapped, saved, device), stock),
        Reader("DCP FileSystemReader", parts, load_dcp, fills=True, is_peer=True),
    ]
    if importlib.util.find_spec("safetensors") is None:
        return found, {"safetensors": "not installed: pip install safetensors"}
    importlib.import_module("safetensors.torch").save_file(state, path)
    for name, module, load in (
        ("safetensors, touched", "safetensors.torch", _touched),
        ("safetensors + clone", "safetensors.torch", _cloned),
        ("fastsafetensors + clone", "fastsafetensors", _fastsafetensors),
    ):
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            missing[name] = f"not installed: pip install {package}"
        else:
            run = partial(load, path, device)
            found.append(Reader(name, (path,), run, partial(_imported, module), is_peer=True))
    return found, missing


def _imported(module: str) -> AbstractContextManager[Any]:
    """Import a module before the load is timed."""
    return nullcontext(importlib.import_module(module))


def _touch(state: State) -> State:
    """Read one byte of every page, as a program that uses the tensors would."""
    for tensor in state.values():
        if tensor.numel() and tensor.device.type == "cpu":
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            raw[::_PAGE].sum()
    return state


def _mapped(path: Path, device: str, _: Any) -> State:
    return _touch(torch.load(path, map_location=device, mmap=True))


def _touched(path: Path, device: str, _: Any) -> State:
    return _touch(importlib.import_module("safetensors.torch").load_file(path, device=device))


def _cloned(path: Path, device: str, _: Any) -> State:
    loaded = importlib.import_module("safetensors.torch").load_file(path, device=device)
    return {name: tensor.to(device, copy=True) for name, tensor in loaded.items()}


def _fastsafetensors(path: Path, device: str, _: Any) -> State:
    package = importlib.import_module("fastsafetensors")
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"  # it wants an index
    # without GPUDirect Storage: where that is not set up, it goes through the host unsaid
    with package.fastsafe_open(filenames=[str(path)], nogds=True, device=device) as file:
        return {name: file.get_tensor(name).to(device, copy=True) for name in list(file.keys())}


def _dcp(folder: Path, target: State | None) -> State:
    found = target or {}
    dcp_read(found, folder)
    return found


def _measure(options: argparse.Namespace, say: Say) -> Result:
    bench = LoadBench(
        folder=options.folder,
        nbytes=options.size,
        tensors=options.tensors,
        gpu=options.gpu,
        runs=options.runs,
        with_fio=not options.no_fio,
        pause=options.pause,
        temperatures=tuple(options.temperature or TEMPERATURES),
    )
    return run_load(bench, say, _peers)


if __name__ == "__main__":
    brief = {"size": 16 << 20, "runs": 1, "temperature": ["cold", "warm"], "no_fio": True}
    script = Script(__doc__, "ten minutes for each GiB", brief)
    script.add("--size", type=size, default=1 << 30, help="of the state dict")
    script.add("--tensors", type=int, default=300, help="of mixed sizes")
    script.add("--temperature", nargs="+", choices=TEMPERATURES, help="only these")
    script.add("--gpu", action="store_true", help="load to the CUDA device")
    script.add("--no-fio", action="store_true", help="without fio")
    script.run(_measure)
