"""cuFile for tests: `cuda.bindings.cufile` by its documented calls, over ordinary files and memory.

It reports as faults what cuFile would suffer from in silence: memory that the device still uses, a
block that is not aligned. Seeded, a call moves fewer bytes than asked for, or fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastserial.engines.gds import cufile
from fastserial.memory import buffers as ring_module
from support.devices import FakeDevice, plugged_in

PAGE = 4096
_ERRORS = {
    5008: "GDS is not supported on the current file",
    5031: "failed to obtain new file descriptor",
    5044: "cufile io error",
}


class CuFileError(Exception):
    """`cuFileError` of the bindings."""

    def __init__(self, status: int) -> None:
        if status < 5000 and status:
            raise ValueError(f"{status} is not a valid OpError")  # as theirs does
        super().__init__(f"{_ERRORS.get(status, 'an error')} ({status})")
        self.status = status


@dataclass
class FakeCuFile:
    """The module. `faults`: by number of the transfer, what becomes of it.

    `"short"`: half a page less than half; `"none"`: nothing; a negative number: that status.
    """

    device: FakeDevice
    faults: dict[int, Any] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)  # by call, the status it fails with
    compat: bool = True
    opened: bool = False  # by somebody else
    version: int = 1170

    cuFileError = CuFileError
    BoolConfigParameter = SimpleNamespace(PROPERTIES_ALLOW_COMPAT_MODE=1)

    def __post_init__(self) -> None:
        self.calls: list[str] = []
        self.moved = 0
        self.transfers = 0
        self.files: dict[int, int] = {}
        self.registered: dict[int, int] = {}

    def renew(self) -> FakeCuFile:
        """Begin anew, in a process that has not used cuFile yet."""
        self.__init__(self.device)  # type: ignore[misc]
        cufile._drivers.clear()
        ring_module._warned.clear()
        return self

    # -- the driver ----------------------------------------------------------------------------

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refusals:
            raise CuFileError(self.refusals[name])

    def driver_open(self) -> None:
        self._called("driver_open")
        if self.opened:
            raise CuFileError(5026)
        self.opened = True

    def set_parameter_bool(self, parameter: int, value: bool) -> None:
        self._called("set_parameter_bool")
        if self.opened:
            raise CuFileError(5026)
        self.compat = value

    def get_parameter_bool(self, parameter: int) -> bool:
        return self.compat

    def get_version(self) -> int:
        return self.version

    def op_status_error(self, status: int) -> str:
        return _ERRORS.get(status, "an error")

    # -- files and memory ----------------------------------------------------------------------

    def handle_register(self, descr: int) -> int:
        self._called("handle_register")
        kind = ctypes.c_int.from_address(descr).value
        fd = ctypes.c_int.from_address(descr + 8).value
        assert kind == 1
        assert ctypes.c_void_p.from_address(descr + 16).value is None
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        assert flags & os.O_DIRECT
        assert not flags & os.O_ASYNC, "a flag that cuFile does not know"
        path = os.readlink(f"/proc/self/fd/{fd}")  # cuFile opens it once more by its path
        if not os.path.exists(path):
            raise CuFileError(5031)
        handle = 7000 + len(self.calls)
        self.files[handle] = fd
        return handle

    def handle_deregister(self, handle: int) -> None:
        self._called("handle_deregister")
        del self.files[handle]

    def buf_register(self, base: int, length: int, flags: int) -> None:
        self._called("buf_register")
        assert not flags
        assert base not in self.registered
        self.registered[base] = length

    def buf_deregister(self, base: int) -> None:
        self._called("buf_deregister")
        del self.registered[base]

    # -- transfers -----------------------------------------------------------------------------

    def read(self, fh: int, base: int, size: int, offset: int, start: int) -> int:
        return self._now(False, fh, base, size, offset, start)

    def write(self, fh: int, base: int, size: int, offset: int, start: int) -> int:
        return self._now(True, fh, base, size, offset, start)

    def _now(self, write: bool, fh: int, base: int, size: int, offset: int, start: int) -> int:
        assert 0 <= start <= start + size <= self.registered[base]
        self.device.free(_tensor(base + start, size), "moved", writes=not write)
        moved = self._move(write, fh, base + start, size, offset)
        if moved == -1:
            raise CuFileError(5)  # which raises ValueError
        return moved

    # -- what happens --------------------------------------------------------------------------

    def _move(self, write: bool, fh: int, address: int, size: int, offset: int) -> int:
        self.transfers += 1
        if (address | offset | size) % PAGE:
            self.device.fault(f"{size} bytes at {offset} from {address} are not aligned")
        fault = self.faults.get(self.transfers)
        if isinstance(fault, int):
            return fault
        if fault == "none":
            return 0
        part = size if fault != "short" else size // 2 - PAGE // 2
        found: Any = _tensor(address, max(1, part)).numpy()
        memory = memoryview(found)[:part]
        if write:
            moved = _write(self.files[fh], memory, offset)
        else:
            moved = _read(self.files[fh], memory, offset)
        self.moved += moved
        return moved


def _tensor(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def _write(fd: int, memory: memoryview, offset: int) -> int:
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:  # without direct I/O
        return os.pwrite(file.fileno(), memory, offset)


def _read(fd: int, memory: memoryview, offset: int) -> int:
    with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
        return os.preadv(file.fileno(), [memory], offset)


def cufile_on(patch: pytest.MonkeyPatch, device: FakeDevice) -> FakeCuFile:
    """Let fastserial find cuFile on a machine whose GPU is a fake device."""
    plugged_in(patch, device)
    fake = FakeCuFile(device)
    patch.setattr(cufile, "missing", lambda: None)
    patch.setattr(cufile, "serves", lambda place: True)
    patch.setattr(cufile, "_drivers", {})
    modules = {"cuda.bindings.cufile": fake, "cuda.bindings.runtime": None}
    patch.setattr(cufile, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    patch.setattr(cufile.CuFile, "on", _on)
    patch.setattr(ring_module, "_warned", set())
    return fake


@contextlib.contextmanager
def _on(driver: Any, device: torch.device) -> Iterator[None]:
    yield
