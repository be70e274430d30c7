"""cuFile for tests: `cuda.bindings.cufile` by its documented calls, over ordinary files and memory.

What is asynchronous happens late and in any order that is allowed, with the parameters that are
in memory at that moment. It finds fault with what cuFile would suffer from in silence: parameters
or memory that change before their time, a file or memory let go of in use, a block that is not
aligned. Seeded, a call moves less than it was to, or fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastserial.engines.gds import cufile
from fastserial.engines.gds import memory as direct_memory
from fastserial.memory import buffers as ring_module
from support.devices import FakeDevice, Fault, plugged_in

PAGE = 4096
_ERRORS = {5008: "GDS is not supported on the current file", 5044: "cufile io error"}


class CuFileError(Exception):
    """`cuFileError` of the bindings."""

    def __init__(self, status: int) -> None:
        if status < 5000 and status:
            raise ValueError(f"{status} is not a valid OpError")  # as theirs does
        super().__init__(f"{_ERRORS.get(status, 'an error')} ({status})")
        self.status = status


class _Batched(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("file_offset", ctypes.c_longlong),
        ("offset", ctypes.c_longlong),
        ("size", ctypes.c_size_t),
    )


class _Params(ctypes.Structure):
    """Written from cufile.h, not from the package."""

    _fields_ = (
        ("mode", ctypes.c_int),
        ("batch", _Batched),
        ("fh", ctypes.c_void_p),
        ("opcode", ctypes.c_int),
        ("cookie", ctypes.c_void_p),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("cookie", ctypes.c_void_p),
        ("status", ctypes.c_int),
        ("ret", ctypes.c_size_t),
    )


@dataclass
class _Transfer:
    """One that was queued: what it was to do then, and how to see what it is to do now."""

    write: bool
    handle: int
    address: int
    size: int
    offset: int
    again: Callable[[], tuple[int, int, int]]
    bytes: bytes | None = None  # of the memory, when it was queued

    def memory(self) -> torch.Tensor:
        return _tensor(self.address, self.size)


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
    batch_size: int = 128
    piece_kib: int = 8
    version: int = 1170

    cuFileError = CuFileError
    BoolConfigParameter = SimpleNamespace(PROPERTIES_ALLOW_COMPAT_MODE=1)
    SizeTConfigParameter = SimpleNamespace(
        PROPERTIES_IO_BATCHSIZE=9, PROPERTIES_PER_BUFFER_CACHE_SIZE_KB=7
    )

    def __post_init__(self) -> None:
        self.random = Random(0)
        self.calls: list[str] = []
        self.moved = 0
        self.transfers = 0
        self.most_in_batch = 0
        self.files: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.batches: dict[int, list[tuple[int, _Transfer]]] = {}
        self.pending = 0

    def renew(self) -> FakeCuFile:
        """Begin anew, in a process that has not used cuFile yet."""
        self.__init__(self.device)  # type: ignore[misc]
        cufile._drivers.clear()
        direct_memory._kept.clear()
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

    def get_parameter_size_t(self, parameter: int) -> int:
        return {9: self.batch_size, 7: self.piece_kib}[parameter]

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
        handle = 7000 + len(self.calls)
        self.files[handle] = fd
        return handle

    def handle_deregister(self, handle: int) -> None:
        self._called("handle_deregister")
        if self.pending:
            self.device.fault("a file was let go of that a transfer was to use")
        del self.files[handle]

    def buf_register(self, base: int, length: int, flags: int) -> None:
        self._called("buf_register")
        assert not flags
        assert base not in self.registered
        self.registered[base] = length

    def buf_deregister(self, base: int) -> None:
        self._called("buf_deregister")
        if self.pending:
            self.device.fault("memory was let go of that a transfer was to use")
        del self.registered[base]

    # -- transfers -----------------------------------------------------------------------------

    def read(self, fh: int, base: int, size: int, offset: int, start: int) -> int:
        return self._now(False, fh, base, size, offset, start)

    def write(self, fh: int, base: int, size: int, offset: int, start: int) -> int:
        return self._now(True, fh, base, size, offset, start)

    def _now(self, write: bool, fh: int, base: int, size: int, offset: int, start: int) -> int:
        self._place(base, start, size)
        self.device.free(_tensor(base + start, size), "moved", writes=not write)
        moved = self._move(write, fh, base + start, size, offset)
        if moved == -1:
            raise CuFileError(5)  # which raises ValueError
        return moved

    def read_async(self, fh: int, base: int, *addresses: int) -> None:
        self._later(False, fh, base, *addresses)

    def write_async(self, fh: int, base: int, *addresses: int) -> None:
        self._later(True, fh, base, *addresses)

    def _later(
        self, write: bool, fh: int, base: int, size_p: int, at_p: int, start_p: int, moved_p: int,
        handle: int,
    ) -> None:  # fmt: skip
        self._called("write_async" if write else "read_async")
        stream = self.device.stream_of(handle)

        def again() -> tuple[int, int, int]:
            size = ctypes.c_size_t.from_address(size_p).value
            at = ctypes.c_longlong.from_address(at_p).value
            return base + ctypes.c_longlong.from_address(start_p).value, size, at

        moved_at = ctypes.c_ssize_t.from_address(moved_p)
        assert moved_at.value == 0
        address, size, at = again()
        self._place(base, address - base, size)
        transfer = _Transfer(write, fh, address, size, at, again)

        def run() -> None:
            self.pending -= 1
            moved_at.value = self._run(transfer)

        self.pending += 1
        stream.add(run, (address, size, not write), transfer.memory())

    # -- batches -------------------------------------------------------------------------------

    def batch_io_set_up(self, most: int) -> int:
        self._called("batch_io_set_up")
        assert 1 <= most <= min(128, self.batch_size)
        handle = 9000 + len(self.calls)
        self.batches[handle] = []
        return handle

    def batch_io_submit(self, batch: int, count: int, params: int, flags: int) -> None:
        self._called("batch_io_submit")
        waiting = self.batches[batch]
        assert 1 <= count <= self.batch_size - len(waiting)
        assert not flags
        self.most_in_batch = max(self.most_in_batch, count)
        for index in range(count):
            one = _Params.from_address(params + index * ctypes.sizeof(_Params))
            assert one.mode == 1

            def again(one: _Params = one) -> tuple[int, int, int]:
                inner = one.batch
                return inner.base + inner.offset, inner.size, inner.file_offset

            address, size, at = again()
            self._place(one.batch.base, one.batch.offset, size)
            assert size <= self.piece_kib * 1024
            transfer = _Transfer(one.opcode == 1, one.fh, address, size, at, again)
            memory = transfer.memory()
            self.device.free(memory, "given to a batch", writes=not transfer.write)
            transfer.bytes = bytes(memory.numpy())
            waiting.append((one.cookie, transfer))
            self.pending += 1

    def batch_io_get_status(
        self, batch: int, least: int, count_p: int, events: int, timeout: int
    ) -> None:
        self._called("batch_io_get_status")
        waiting = self.batches[batch]
        count = ctypes.c_uint.from_address(count_p)
        assert 1 <= least <= count.value
        assert ctypes.c_long.from_address(timeout).value >= 0
        found = 0
        while waiting and found < count.value and (found < least or self.random.random() < 0.4):
            cookie, transfer = waiting.pop(self.random.randrange(len(waiting)))
            self.pending -= 1
            try:
                moved = self._run(transfer)
            except Fault:  # noted; what was queued comes to its end
                moved = -5030
            event = _Event.from_address(events + found * ctypes.sizeof(_Event))
            event.cookie, event.ret = cookie, moved % 2**64
            event.status = 0x10 if moved >= 0 else 0x40
            if moved == -110:
                event.status = 0x20
            found += 1
        count.value = found

    def batch_io_destroy(self, batch: int) -> None:
        self._called("batch_io_destroy")
        if self.batches.pop(batch):
            self.device.fault("a batch was let go of that was not over")

    # -- what happens --------------------------------------------------------------------------

    def _place(self, base: int, start: int, size: int) -> None:
        """Look where memory is: an offset is for registered memory, and inside it."""
        if start:
            assert 0 <= start <= start + size <= self.registered[base]

    def _run(self, transfer: _Transfer) -> int:
        """Do later what was queued."""
        if transfer.again() != (transfer.address, transfer.size, transfer.offset):
            self.device.fault("parameters changed before a transfer ran")
        now = bytes(transfer.memory().numpy())
        if transfer.bytes is not None and transfer.bytes != now:
            self.device.fault("memory changed that a transfer was to use")
        if transfer.handle not in self.files:
            self.device.fault("a file was let go of that a transfer was to use")
        return self._move(
            transfer.write, transfer.handle, transfer.address, transfer.size, transfer.offset
        )

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
    patch.setattr(cufile, "probe_gpus", lambda: SimpleNamespace(ways=["nvidia-fs"]))
    modules = {"cuda.bindings.cufile": fake, "cuda.bindings.runtime": None}
    patch.setattr(cufile, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    patch.setattr(cufile.CuFile, "on", _on)
    patch.setattr(direct_memory, "_kept", [])
    patch.setattr(direct_memory, "_lost", set())
    patch.setattr(ring_module, "_warned", set())
    return fake


@contextlib.contextmanager
def _on(driver: Any, device: torch.device) -> Iterator[None]:
    yield
