"""What is said of a machine before cuFile is touched, and its calls beside those of the package."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cufile import _Event, _Params
from support.processes import PROGRAMS, run

from fastserial.engines.gds import cufile
from fastserial.memory.ring import DIRECT

STUB = PROGRAMS / "engines" / "cufile_stub.c"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with all that is needed, as far as it is looked at."""
    versions = {"cuda-bindings": "13.1.0", "numpy": "2.0"}
    host = SimpleNamespace(gds="nvidia-fs", p2pdma_lacks=("a newer kernel",))
    found: dict[str, Any] = {"versions": versions, "host": host}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cufile, "metadata", SimpleNamespace(
        version=version, PackageNotFoundError=metadata.PackageNotFoundError
    ))  # fmt: skip
    monkeypatch.setattr(cufile, "probe_gpus", lambda: found["host"])
    return found


def test_nothing_missing(machine: dict[str, Any]) -> None:
    assert cufile.missing() is None
    machine["versions"]["cuda-bindings"] = "14.0rc1"
    assert cufile.missing() is None


def test_no_way_past_the_host(machine: dict[str, Any]) -> None:
    machine["host"].gds = "compat"
    assert "P2PDMA lacks a newer kernel" in str(cufile.missing())
    machine["host"] = None
    assert "through the host" in str(cufile.missing())


def test_asking_imports_nothing(machine: dict[str, Any]) -> None:
    before = set(sys.modules)
    cufile.missing()
    assert not [name for name in set(sys.modules) - before if name.startswith("cuda")]


# --- the package ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module() -> Any:
    """`cuda.bindings.cufile`, which can be imported without a GPU; nothing in it is called."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs the package cuda-bindings")
    return pytest.importorskip("cuda.bindings.cufile", reason="needs cuda-bindings and numpy")


def test_structures(module: Any) -> None:
    params, events = module.io_params_dtype, module.io_events_dtype
    union = params.fields["u"][1]
    inner = params.fields["u"][0].fields["batch"][0].fields
    assert ctypes.sizeof(cufile.IOParams) == params.itemsize
    assert {
        "mode": cufile.IOParams.mode.offset,
        "fh": cufile.IOParams.file.offset,
        "opcode": cufile.IOParams.opcode.offset,
        "cookie": cufile.IOParams.cookie.offset,
    } == {name: params.fields[name][1] for name in ("mode", "fh", "opcode", "cookie")}
    assert {
        "dev_ptr_base": cufile.IOParams.base.offset - union,
        "file_offset": cufile.IOParams.file_offset.offset - union,
        "dev_ptr_offset": cufile.IOParams.start.offset - union,
        "size_": cufile.IOParams.size.offset - union,
    } == {name: inner[name][1] for name in inner}
    assert ctypes.sizeof(cufile.IOEvents) == events.itemsize
    ours = (cufile.IOEvents.cookie, cufile.IOEvents.status, cufile.IOEvents.moved)
    assert [field.offset for field in ours] == [
        events.fields[name][1] for name in ("cookie", "status", "ret")
    ]
    descr = module.descr_dtype
    assert ctypes.sizeof(cufile.Descr) == descr.itemsize
    assert (cufile.Descr.type.offset, cufile.Descr.handle.offset, cufile.Descr.fs_ops.offset) == (
        tuple(descr.fields[name][1] for name in ("type", "handle", "fs_ops"))
    )


def test_numbers(module: Any) -> None:
    assert int(module.FileHandleType.OPAQUE_FD) == cufile._OPAQUE_FD
    assert int(module.BatchMode.BATCH) == cufile._BATCH
    assert {op.name: code for op, code in cufile._OPCODES.items()} == {
        name: int(getattr(module.Opcode, name)) for name in ("READ", "WRITE")
    }
    status = module.Status
    assert int(status.COMPLETE) == cufile._COMPLETE
    assert int(status.COMPLETE) | int(status.FAILED) | int(status.INVALID) == cufile._OVER
    assert int(status.CANCELED) | int(status.TIMEOUT) == cufile._UNKNOWN
    assert int(module.OpError.DRIVER_ALREADY_OPEN) == cufile._ALREADY_OPEN
    for name in ("PROPERTIES_IO_BATCHSIZE", "PROPERTIES_PER_BUFFER_CACHE_SIZE_KB"):
        assert hasattr(module.SizeTConfigParameter, name)
    assert hasattr(module.BoolConfigParameter, "PROPERTIES_ALLOW_COMPAT_MODE")


def test_the_error_of_an_errno(module: Any) -> None:
    """It has no name among cuFile's errors: we take a `ValueError` for it."""
    with pytest.raises(ValueError, match="5"):
        module.cuFileError(5)


@pytest.fixture(scope="module")
def stub(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that the package takes for cuFile's."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc)")
    library = tmp_path_factory.mktemp("stub") / "libcufile.so.0"
    options = ("-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library.name}")
    subprocess.run([compiler, *options, STUB, "-o", library], check=True)
    return library


@pytest.mark.parametrize("fault", ["", "3 -5008", "4 -1"])
@pytest.mark.parametrize("word", DIRECT)
def test_the_package(stub: Path, tmp_path: Path, word: str, fault: str) -> None:
    """A save and a load, through the package itself."""
    fault_of_stub = {"CUFILE_STUB_FAULT": fault}
    ended = run("past_the_host", stub, word, tmp_path, variables=fault_of_stub, timeout=100)
    saved, loaded = ended.out.splitlines()
    assert loaded.startswith(f"{word}: asked for: cuFile 99.99")
    if fault:
        assert saved.startswith(f"cpu_async_gpu: {word}: cuFile")
        assert ("(5008)" if "5008" in fault else "an error of the file system") in saved
    else:
        assert saved == loaded


def test_the_fakes_structures() -> None:
    """Two readings of cufile.h: the fake's and ours."""
    assert ctypes.sizeof(_Params) == ctypes.sizeof(cufile.IOParams)
    assert _Params.fh.offset == cufile.IOParams.file.offset
    assert _Params.cookie.offset == cufile.IOParams.cookie.offset
    assert ctypes.sizeof(_Event) == ctypes.sizeof(cufile.IOEvents)
