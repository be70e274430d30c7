"""What is said of a machine before cuFile is touched, and its calls beside those of the package."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import sys
from typing import Any

import pytest
import torch
from support.cufile import FakeCuFile

from fastserial.engines.gds import cufile


def test_asking_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with all that is needed, as far as it is looked at."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    before = set(sys.modules)
    assert cufile.missing() is None
    assert not [name for name in set(sys.modules) - before if name.startswith("cuda")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "cuda-bindings" in str(cufile.missing())


# --- the package ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module() -> Any:
    """`cuda.bindings.cufile`, which can be imported without a GPU; nothing in it is called."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs the package cuda-bindings")
    return pytest.importorskip("cuda.bindings.cufile", reason="needs cuda-bindings and numpy")


CALLS = [
    name
    for name, _ in inspect.getmembers(FakeCuFile, inspect.isfunction)
    if not name.startswith("_") and name != "renew"
]


@pytest.mark.parametrize("name", CALLS)
def test_calls(module: Any, name: str) -> None:
    """The functions that we call take as many arguments as we give."""
    taken = (getattr(module, name).__doc__ or "").splitlines()[0]
    count = len([one for one in taken.partition("(")[2].partition(")")[0].split(",") if one])
    ours = inspect.signature(getattr(FakeCuFile, name)).parameters
    assert count == len(ours) - 1, taken


def test_structures(module: Any) -> None:
    descr = module.descr_dtype
    assert ctypes.sizeof(cufile.FileDescription) == descr.itemsize
    for name in ("type", "handle", "fs_ops"):
        assert getattr(cufile.FileDescription, name).offset == descr.fields[name][1]


def test_numbers(module: Any) -> None:
    assert int(module.FileHandleType.OPAQUE_FD) == cufile._OPAQUE_FD
    assert int(module.OpError.DRIVER_ALREADY_OPEN) == cufile._ALREADY_OPEN
    assert hasattr(module.BoolConfigParameter, "PROPERTIES_ALLOW_COMPAT_MODE")


def test_the_error_of_an_errno(module: Any) -> None:
    """It has no name among cuFile's errors: we take a `ValueError` for it."""
    with pytest.raises(ValueError, match="5"):
        module.cuFileError(5)
