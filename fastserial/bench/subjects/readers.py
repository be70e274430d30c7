"""The ways to load a checkpoint that `fastserial bench load` compares."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastserial.bench.measuring.pages import small_pages
from fastserial.bench.subjects import dcp
from fastserial.bench.subjects.saving import fast, stock
from fastserial.checkpoints.load_into import load_into

__all__ = ["HOST", "Files", "Reader", "Shapes", "readers", "shapes_of", "touch"]

State = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # of the tensors of a state dict
HOST = "cpu"  # where to load to, if not to a device
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Files:
    """The same state dict in every container that a reader wants."""

    zip: Path
    legacy: Path
    safetensors: Path | None
    dcp: Path | None

    def all(self) -> list[Path]:
        """Return every file in their folder."""
        return [path for path in self.zip.parent.rglob("*") if path.is_file()]


@dataclass(frozen=True, slots=True)
class Reader:
    """One way to load.

    Attributes:
        name: what is measured.
        paths: files it reads, to be put into or out of the page cache.
        load: loads everything and returns it.
        context: entered around the load and the timing.
        small_pages: it shuns huge pages, and is compared with a fio that has none.
        modules: what is imported before the load is timed.
        prepare: makes what the load needs before it is timed, such as tensors to fill.
        group: `torch` (torch.load and this package) or `peer`.
    """

    name: str
    paths: tuple[Path, ...]
    load: Callable[[Any], State]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare: Callable[[], Any] = lambda: None
    small_pages: bool = False
    modules: tuple[str, ...] = ()
    group: str = "torch"


def shapes_of(state: State) -> Shapes:
    """Return what is to be known of a state dict to make room for another."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}


def readers(
    files: Files, shapes: Shapes, device: str = HOST
) -> tuple[list[Reader], dict[str, str]]:
    """Return what can run here, and for the others why they cannot.

    Args:
        files: what they read.
        shapes: of the tensors in it.
        device: where they load to.
    """
    target = _Target(shapes, device)
    found = [*_torch(files, target)]
    missing: dict[str, str] = {}
    for name, module, command, make in _PEERS:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            missing[name] = f"not installed: {command}"
        elif isinstance(made := make(name, module, files, target), str):
            missing[name] = made
        else:
            found.append(made)
    return found, missing


def touch(state: State) -> State:
    """Read one byte of every page, as a program that uses the tensors would."""
    for tensor in state.values():
        if tensor.numel() and tensor.device.type == HOST:
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            raw[::_PAGE].sum()
    return state


@dataclass(frozen=True, slots=True)
class _Target:
    """Where tensors of these shapes are loaded to."""

    shapes: Shapes
    device: str

    def empty(self) -> State:
        """Return tensors to fill, their memory already there."""
        return {
            name: torch.empty(shape, dtype=dtype, device=self.device).fill_(0)
            for name, (dtype, shape) in self.shapes.items()
        }

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of what is memory of others', or of the host's."""
        return tensor.to(self.device, copy=True)


def _torch(files: Files, target: _Target) -> Iterator[Reader]:
    place = None if target.device == HOST else target.device

    def reader(name: str, path: Path, context: Any, **more: Any) -> Reader:
        load = partial(torch.load, path, map_location=place)
        return Reader(name, (path,), lambda _: load(), context, **more)

    def mapped(_: Any) -> State:
        return touch(torch.load(files.zip, map_location=place, mmap=True))

    yield reader("stock zip", files.zip, stock)
    yield Reader("stock zip, mmap, touched", (files.zip,), mapped, stock)
    yield reader("stock legacy", files.legacy, stock)
    yield reader("fastserial zip", files.zip, fast)
    if place is None:
        pages = _fast_on_small_pages
        yield reader("fastserial zip, small pages", files.zip, pages, small_pages=True)
    yield reader("fastserial zip, verified", files.zip, lambda: fast(verify_on_load=True))
    yield reader("fastserial legacy", files.legacy, fast)

    def fill(found: State) -> State:
        load_into(found, files.zip)
        return found

    yield Reader("fastserial load_into", (files.zip,), fill, prepare=target.empty)


@contextmanager
def _fast_on_small_pages() -> Iterator[None]:
    with fast(), small_pages():
        yield


# -- peers ---------------------------------------------------------------------------------------

# the row's name and module; a text says why it cannot run
_Make = Callable[[str, str, Files, _Target], Reader | str]
_BENCH = "pip install safetensors"


def _of_safetensors(load: Callable[[Any, Path, _Target], State]) -> _Make:
    """Return what makes a reader of the safetensors file; `load` gets its module and the path."""

    def make(name: str, module: str, files: Files, target: _Target) -> Reader | str:
        path = files.safetensors
        if path is None:
            return "safetensors, which makes its file, is missing"

        def run(_: Any) -> State:
            return load(importlib.import_module(module), path, target)

        return Reader(name, (path,), run, modules=(module,), group="peer")

    return make


def _touched(package: Any, path: Path, target: _Target) -> State:
    return touch(package.load_file(path, device=target.device))


def _cloned(package: Any, path: Path, target: _Target) -> State:
    loaded = package.load_file(path, device=target.device)
    return {key: target.own(tensor) for key, tensor in loaded.items()}


def _fastsafetensors(package: Any, path: Path, target: _Target) -> State:
    # without GPUDirect Storage: where that is not set up, it goes through the host unsaid
    with package.fastsafe_open(filenames=[str(path)], nogds=True, device=target.device) as file:
        return {key: target.own(file.get_tensor(key)) for key in list(file.keys())}


def _runai(package: Any, path: Path, target: _Target) -> State:
    with package.SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return {key: target.own(tensor) for key, tensor in streamer.get_tensors()}


def _instanttensor(name: str, module: str, files: Files, target: _Target) -> Reader | str:
    if not torch.cuda.is_available():
        return "it loads to CUDA devices only, and there is none"

    def load(package: Any, path: Path, target: _Target) -> State:
        with package.safe_open(str(path), "pt", "cuda:0") as file:
            return {key: target.own(tensor) for key, tensor in file.tensors()}

    return _of_safetensors(load)(name, module, files, target)


def _dcp(name: str, module: str, files: Files, target: _Target) -> Reader | str:
    folder = files.dcp
    if folder is None:
        return "it could not save"

    def load(found: State) -> State:
        dcp.read(found, folder)
        return found

    paths = tuple(sorted(path for path in folder.iterdir() if path.suffix == ".distcp"))
    return Reader(name, paths, load, prepare=target.empty, modules=(module,), group="peer")


_DCP = "torch.distributed.checkpoint"
_PEERS: list[tuple[str, str, str, _Make]] = [
    ("safetensors, touched", "safetensors.torch", _BENCH, _of_safetensors(_touched)),
    ("safetensors + clone", "safetensors.torch", _BENCH, _of_safetensors(_cloned)),
    (
        "fastsafetensors + clone",
        "fastsafetensors",
        "pip install fastsafetensors",
        _of_safetensors(_fastsafetensors),
    ),
    (
        "runai-model-streamer + clone",
        "runai_model_streamer",
        "pip install runai-model-streamer",
        _of_safetensors(_runai),
    ),
    ("instanttensor", "instanttensor", "pip install instanttensor", _instanttensor),
    ("DCP FileSystemReader", _DCP, "pip install a torch with torch.distributed", _dcp),
]
