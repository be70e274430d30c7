"""The ways to load a checkpoint that `fastserial bench load` compares."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastserial.bench import dcp
from fastserial.bench.saving import fast, stock
from fastserial.filling import load_into

__all__ = ["Files", "Reader", "readers", "touch"]

State = dict[str, torch.Tensor]
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Files:
    """The same state dict in every container that a reader wants."""

    zip: Path
    legacy: Path
    safetensors: Path | None
    dcp: Path | None


@dataclass(frozen=True, slots=True)
class Reader:
    """One way to load.

    Attributes:
        name: what is measured.
        paths: files it reads, to be put into or out of the page cache.
        load: loads everything and returns it.
        context: entered around the load and the timing.
        prepare: makes what the load needs before it is timed, such as tensors to fill.
        group: `torch` (torch.load and this package) or `peer`.
    """

    name: str
    paths: tuple[Path, ...]
    load: Callable[[Any], State]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare: Callable[[], Any] = lambda: None
    group: str = "torch"


def readers(files: Files, state: State) -> tuple[list[Reader], dict[str, str]]:
    """Return what can run here, and for the others why they cannot."""
    found = [*_torch(files), *_ours(files, state)]
    missing: dict[str, str] = {}
    for name, module, make in _PEERS:
        if importlib.util.find_spec(module) is None:
            missing[name] = f"not installed: pip install {module.replace('_', '-')}"
        elif (reader := make(name, files, state)) is None:
            missing[name] = "there is no file for it"
        else:
            found.append(reader)
    return found, missing


def touch(state: State) -> State:
    """Read one byte of every page, as a program that uses the tensors would."""
    for tensor in state.values():
        if tensor.numel():
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            raw[::_PAGE].sum()
    return state


def _torch(files: Files) -> Iterator[Reader]:
    yield Reader("stock zip", (files.zip,), lambda _: torch.load(files.zip), stock)
    yield Reader(
        "stock zip, mmap, touched",
        (files.zip,),
        lambda _: touch(torch.load(files.zip, mmap=True)),
        stock,
    )
    yield Reader("stock legacy", (files.legacy,), lambda _: torch.load(files.legacy), stock)


def _ours(files: Files, state: State) -> Iterator[Reader]:
    yield Reader("fastserial zip", (files.zip,), lambda _: torch.load(files.zip), fast)
    yield Reader(
        "fastserial zip, verified",
        (files.zip,),
        lambda _: torch.load(files.zip),
        lambda: fast(verify_on_load=True),
    )
    yield Reader("fastserial legacy", (files.legacy,), lambda _: torch.load(files.legacy), fast)

    def fill(target: State) -> State:
        load_into(target, files.zip)
        return target

    yield Reader("fastserial load_into", (files.zip,), fill, nullcontext, lambda: _empty(state))


def _empty(state: State) -> State:
    """Return tensors to fill, their memory already there."""
    return {key: torch.zeros_like(tensor) for key, tensor in state.items()}


# -- peers ---------------------------------------------------------------------------------------

_Make = Callable[[str, Files, State], Reader | None]


def _safetensors(clone: bool) -> _Make:
    def make(name: str, files: Files, state: State) -> Reader | None:
        path = files.safetensors
        if path is None:
            return None

        def load(_: Any) -> State:
            from safetensors.torch import load_file

            found: State = load_file(path)
            return {k: t.clone() for k, t in found.items()} if clone else touch(found)

        return Reader(name, (path,), load, group="peer")

    return make


def _fastsafetensors(name: str, files: Files, state: State) -> Reader | None:
    path = files.safetensors
    if path is None:
        return None

    def load(_: Any) -> State:
        package: Any = importlib.import_module("fastsafetensors")
        with package.fastsafe_open(filenames=[str(path)], nogds=True, device="cpu") as file:
            return {key: file.get_tensor(key).clone() for key in list(file.keys())}

    return Reader(name, (path,), load, group="peer")


def _runai(name: str, files: Files, state: State) -> Reader | None:
    path = files.safetensors
    if path is None:
        return None

    def load(_: Any) -> State:
        package: Any = importlib.import_module("runai_model_streamer")
        with package.SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return {key: tensor.clone() for key, tensor in streamer.get_tensors()}

    return Reader(name, (path,), load, group="peer")


def _instanttensor(name: str, files: Files, state: State) -> Reader | None:
    path = files.safetensors
    if path is None or not torch.cuda.is_available():  # it reads to GPUs only
        return None

    def load(_: Any) -> State:
        package: Any = importlib.import_module("instanttensor")
        with package.safe_open(str(path), "pt", "cuda:0") as file:
            return {key: tensor.cpu() for key, tensor in file.tensors()}

    return Reader(name, (path,), load, group="peer")


def _dcp(name: str, files: Files, state: State) -> Reader | None:
    folder = files.dcp
    if folder is None:
        return None

    def load(target: State) -> State:
        dcp.read(target, folder)
        return target

    paths = tuple(sorted(path for path in folder.iterdir() if path.suffix == ".distcp"))
    return Reader(name, paths, load, prepare=lambda: _empty(state), group="peer")


_PEERS: list[tuple[str, str, _Make]] = [
    ("safetensors, touched", "safetensors", _safetensors(False)),
    ("safetensors + clone", "safetensors", _safetensors(True)),
    ("fastsafetensors + clone", "fastsafetensors", _fastsafetensors),
    ("runai-model-streamer + clone", "runai_model_streamer", _runai),
    ("instanttensor", "instanttensor", _instanttensor),
    ("DCP FileSystemReader", "torch.distributed.checkpoint", _dcp),
]
