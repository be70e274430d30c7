"""torch.load in all its forms: every keyword, every context, as stock."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.corpus import FORMATS, TORCH, noise
from support.identity import digest, fast, saved
from support.loading import FORCED, both

DIRECT = FORCED["direct"]
pytestmark = pytest.mark.usefixtures("all_forced")


def state() -> dict[str, Any]:
    base = torch.arange(5000, dtype=torch.float32)
    return {
        "w": torch.randn(70, 300),
        "tied": base,
        "view": base[10:400],
        "empty": torch.empty(0),
        "small": noise(700),
        "bf16": torch.randn(3000).bfloat16(),
        "n": [1, "x", None],
    }


# --- map_location -------------------------------------------------------------------------------


@pytest.fixture
def tagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Files whose storages say that they come from a GPU."""

    def make(fmt: str) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
            return saved(tmp_path, state(), fmt, f"tagged-{fmt}.pt")

    return make


def _raising(storage: Any, location: str) -> Any:
    raise ValueError(location)


LOCATIONS: dict[str, Any] = {
    "none": None,
    "cpu": "cpu",
    "cpu_0": "cpu:0",
    "bytes": b"cpu",
    "device": torch.device("cpu"),
    "meta": "meta",
    "meta_device": torch.device("meta"),
    "dict": {"cuda:1": "cpu"},
    "dict_same": {"cpu": "cpu"},
    "dict_meta": {"cuda:1": "meta", "cpu": "meta"},
    "cuda": "cuda:0",
    "nonsense": "no such device",
    "identity": lambda storage, location: storage,
    "undecided": lambda storage, location: None,
    "clone": lambda storage, location: storage.clone(),
    "to_meta": lambda storage, location: torch.UntypedStorage(storage.nbytes(), device="meta"),
    "raising": _raising,
    "not_callable": 5,
}


@pytest.mark.parametrize("name", LOCATIONS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_map_location(name: str, fmt: str, tmp_path: Path, tagged: Callable[[str], Path]) -> None:
    if torch.cuda.is_available() and name in ("cuda", "none"):
        pytest.skip("the machine has the device")
    for path in (saved(tmp_path, state(), fmt), tagged(fmt)):
        both(lambda p=path: torch.load(p, map_location=LOCATIONS[name]), DIRECT, FORCED["verified"])


@pytest.mark.parametrize("fmt", FORMATS)
def test_map_location_sees_the_bytes(fmt: str, tmp_path: Path) -> None:
    """A callable may look at each storage when it is called, in stock's order."""
    path = saved(tmp_path, state(), fmt)
    calls: list[Any] = []

    def look(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        body = bytes(storage) if fmt == "zip" else b""  # legacy fills them later
        calls.append((location, storage.nbytes(), digest(body)))
        return storage

    def seen() -> list[Any]:
        found = list(calls)
        calls.clear()
        return found

    both(lambda: torch.load(path, map_location=look), DIRECT, extra=seen)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "place", [None, torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, location: storage]
)
def test_the_host_needs_no_device(
    fmt: str, place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks torch whether there is one begins CUDA in the process."""
    asked: list[str] = []
    for module in (torch.cuda, torch.accelerator):
        for name in ("is_available", "device_count"):
            monkeypatch.setattr(module, name, lambda name=name: asked.append(name) or 0)
    with fast(small_file=0):
        torch.save(state(), tmp_path / "f.pt", _use_new_zipfile_serialization=fmt == "zip")
        torch.load(tmp_path / "f.pt", map_location=place)
    assert asked == []


# --- other keywords and contexts ----------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_mmap(fmt: str, tmp_path: Path) -> None:
    path = saved(tmp_path, state(), fmt)

    def load() -> Any:
        found = torch.load(path, mmap=True)
        return [one.clone() for one in found.values() if isinstance(one, torch.Tensor)]

    both(load, DIRECT, FORCED["verified"])
    with fast(**DIRECT):
        if fmt == "zip":
            mapped = torch.load(path, mmap=True)
            assert str(path) in Path("/proc/self/maps").read_text()
            del mapped
    with open(path, "rb") as file:
        both(lambda: file.seek(0) or torch.load(file, mmap=True), DIRECT)


def _setting(name: str) -> AbstractContextManager[Any]:
    from torch.utils.serialization import config

    return config.patch(f"load.{name}", True)  # type: ignore[no-any-return]


def _environment(name: str) -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {name: "1"})


CONTEXTS: dict[str, tuple[tuple[int, int], Callable[[], AbstractContextManager[Any]]]] = {
    "mmap_default": ((2, 7), lambda: _setting("mmap")),
    "offsets": ((2, 7), lambda: _setting("calculate_storage_offsets")),
    "debug": ((2, 7), lambda: _environment("TORCH_SERIALIZATION_DEBUG")),
    "skip_data": ((2, 6), torch.serialization.skip_data),
    "default_device": ((2, 6), lambda: torch.device("meta")),
    "inference": ((2, 6), torch.inference_mode),
    "deterministic": ((2, 6), lambda: _deterministic()),
    "safe_only": ((2, 6), lambda: _environment("TORCH_FORCE_WEIGHTS_ONLY_LOAD")),
    "unsafe": ((2, 6), lambda: _environment("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")),
}


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_contexts(name: str, fmt: str, tmp_path: Path) -> None:
    since, context = CONTEXTS[name]
    if since > TORCH:
        pytest.skip(f"needs torch {since}")
    path = saved(tmp_path, state(), fmt)
    bare = (name == "skip_data" and fmt == "legacy") or (name == "skip_data" and TORCH > (2, 6))

    def load() -> Any:
        with context():
            found = torch.load(path)
        # memory that nobody wrote to is not the same twice
        return (
            [(t.dtype, t.shape) for t in found.values() if hasattr(t, "dtype")] if bare else found
        )

    both(load, DIRECT)


class Custom:
    """A class that weights_only does not know."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("weights_only", [None, True, False])
def test_weights_only(weights_only: bool | None, fmt: str, tmp_path: Path) -> None:
    values = [torch.randn(2000), Custom(noise(9000)), collections.Counter("abc"), torch.randn(30)]
    path = saved(tmp_path, values, fmt)

    def load() -> Any:
        return torch.load(path, weights_only=weights_only)

    want = both(load, DIRECT)
    assert (want.error is None) == (weights_only is False)

    def allowed() -> Any:
        with torch.serialization.safe_globals([Custom, collections.Counter]):
            return load()

    assert both(allowed, DIRECT, FORCED["verified"]).error is None


@pytest.mark.parametrize("fmt", FORMATS)
def test_pickle_arguments(fmt: str, tmp_path: Path) -> None:
    path = saved(tmp_path, state(), fmt)
    python = type("python", (), {"__name__": "python"})
    python.Unpickler, python.load = pickle._Unpickler, pickle._load  # type: ignore[attr-defined]
    for options in (
        {"weights_only": False, "encoding": "latin1"},
        {"weights_only": False, "encoding": "bytes"},
        {"weights_only": False, "errors": "ignore"},
        {"weights_only": True, "encoding": "ascii"},
        {"weights_only": False, "fix_imports": False},
        {"weights_only": False, "pickle_module": python},
        {"weights_only": True, "pickle_module": python},
        {"weights_only": False, "no_such_argument": 1},
    ):
        both(lambda options=options: torch.load(path, **options), DIRECT)


# --- byte order ---------------------------------------------------------------------------------


def test_byte_order_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")
        path = saved(tmp_path, [torch.arange(3000.0), torch.arange(5), torch.ones(40)])
    assert both(lambda: torch.load(path), DIRECT, FORCED["verified"]).error is None
    data = path.read_bytes()
    assert data.count(b"big") == 1
    path.write_bytes(data.replace(b"big", b"mid"))
    assert isinstance(both(lambda: torch.load(path), DIRECT).error, ValueError)


# --- other containers ---------------------------------------------------------------------------


def test_torchscript_archive(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(90, 90)), path)

    def load(**options: Any) -> Any:
        return torch.load(path, **options)

    both(load, DIRECT)
    both(lambda: load(weights_only=False).state_dict(), DIRECT)


def test_not_checkpoints(tmp_path: Path) -> None:
    import zipfile

    plain = tmp_path / "plain.zip"
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("a/b", "text")
    for name, body in (("empty", b""), ("text", b"hello"), ("zip_start", b"PK\x03\x04")):
        (tmp_path / name).write_bytes(body)
    for name in ("plain.zip", "empty", "text", "zip_start", "missing", ""):
        for weights_only in (True, False):
            load = functools.partial(torch.load, tmp_path / name, weights_only=weights_only)
            both(load, DIRECT)


# --- nesting, threads, memory -------------------------------------------------------------------
