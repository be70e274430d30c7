"""cuFile (GPUDirect Storage) by `cuda.bindings.cufile`, as NVIDIA documents both.

Nobody has run it on a GPU: docs/guide/gpu.md. `missing` calls nothing of cuFile, whose
`cuFileDriverOpen` was seen not to return where there is no driver; the rest is for processes that
have tensors on a GPU, and so a context.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from fastserial.config.performance import PAGE, KiB
from fastserial.engines import Op
from fastserial.engines.gds.host import probe_gpus

if TYPE_CHECKING:
    import torch

__all__ = [
    "Call",
    "CuFile",
    "DirectTransferError",
    "Region",
    "missing",
    "open_driver",
    "serves",
]

_PACKAGE, _OLDEST = "cuda-bindings", (13, 1)  # before, the bytes that were moved are invisible
_MOST = 128  # transfers of a batch
_ALREADY_OPEN = 5026  # CU_FILE_DRIVER_ALREADY_OPEN
_OPAQUE_FD = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
_BATCH = 1  # CUFILE_BATCH
_BATCH_MARGIN = 64 * KiB
_OPCODES = {Op.READ: 0, Op.WRITE: 1}
_PATIENCE = 1  # seconds until it is asked again how a batch is getting on
_COMPLETE, _OVER = 0x10, 0x10 | 0x40 | 0x04  # CUFILE_COMPLETE; and FAILED, INVALID
_UNKNOWN = 0x08 | 0x20  # CANCELED, TIMEOUT: the device may still be at it


class DirectTransferError(OSError):
    """A transfer past the host failed; the bytes can still go through it.

    Attributes:
        status: the driver's own number for it; 0: none, or an error of the file system.
        settled: whether the driver is done with the memory; if not, it may never be used again.
    """

    settled = True

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(errno.EIO, message)
        self.status = status

    def __str__(self) -> str:
        return str(self.strerror)


class Call(ctypes.Structure):
    """Parameters of one transfer. One that is asynchronous reads and writes them as it runs.

    `size` bytes, at `offset` of the file, from byte `start` of the region on. `moved`: how many
    were, or the driver's negative status.
    """

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("moved", ctypes.c_ssize_t),
    )
    size: int
    offset: int
    start: int
    moved: int


class Region(NamedTuple):
    """Device memory from `address` on; the driver may have it registered."""

    device: torch.device
    address: int
    registered: bool


class Descr(ctypes.Structure):
    """`CUfileDescr_t`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle", ctypes.c_void_p),  # a union, of `int fd`
        ("fs_ops", ctypes.c_void_p),
    )


class IOParams(ctypes.Structure):
    """`CUfileIOParams_t`."""

    _fields_ = (
        ("mode", ctypes.c_int),
        ("base", ctypes.c_void_p),
        ("file_offset", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("file", ctypes.c_void_p),
        ("opcode", ctypes.c_int),
        ("cookie", ctypes.c_void_p),
    )


class IOEvents(ctypes.Structure):
    """`CUfileIOEvents_t`."""

    _fields_ = (
        ("cookie", ctypes.c_void_p),
        ("status", ctypes.c_int),
        ("moved", ctypes.c_ssize_t),  # `size_t`, "-ve error or amount of I/O done"
    )


class Timespec(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def missing() -> str | None:
    """Return why cuFile cannot be had on this machine, or None. Calls nothing of it."""
    import torch

    if torch.version.cuda is None:
        return "cuFile needs a torch that is built for CUDA"
    if not torch.cuda.is_available():
        return "cuFile needs a GPU, and torch sees none"
    wanted = f"cuFile needs the package {_PACKAGE} {_OLDEST[0]}.{_OLDEST[1]} or later, and numpy"
    try:
        found = metadata.version(_PACKAGE)
        metadata.version("numpy")
    except metadata.PackageNotFoundError as error:
        return f"{wanted}; {error.name} is not installed"
    from packaging.version import InvalidVersion, Version

    try:
        if Version(found).release < _OLDEST:
            return f"{wanted}; there is {found}"
    except InvalidVersion:
        return f"{wanted}; there is {found!r}"
    host = probe_gpus()
    if host is None or host.gds == "compat":
        lacks = ", ".join(host.p2pdma_lacks) if host is not None else ""
        return (
            "cuFile would go through the host here (compat): there is no nvidia-fs"
            f"{', and P2PDMA lacks ' + lacks if lacks else ''}"
        )
    return None


def serves(device: torch.device) -> bool:
    """Return whether cuFile moves the memory of a device."""
    return device.type == "cuda"


_drivers: dict[int, CuFile] = {}  # by process: a forked child's is another


def open_driver(device: torch.device) -> CuFile:
    """Return cuFile, of which nothing is `missing`, for a device that has a context.

    Raises:
        DirectTransferError: it cannot be had, or cannot be kept from going through the host.
    """
    pid = os.getpid()
    if pid not in _drivers:
        host = probe_gpus()
        way = " or ".join(host.ways) if host is not None else "by a way unknown"
        try:
            module = importlib.import_module("cuda.bindings.cufile")
            runtime = importlib.import_module("cuda.bindings.runtime")
        except Exception as error:  # a library that is not there is no ImportError
            raise DirectTransferError(f"cuFile cannot be loaded: {error}") from error
        _drivers[pid] = CuFile(module, runtime, way, device)
    return _drivers[pid]


class CuFile:
    """cuFile in this process. Any thread may call it, several at once.

    It knows files by handles of its own and device memory by addresses. Every count that it gives
    is looked at by who called it. All raise `DirectTransferError` where cuFile says no.

    Attributes:
        name: with its version, and the way that bytes take.
        largest_piece: bytes of one transfer of a batch.
    """

    def __init__(self, module: Any, runtime: Any, way: str, device: torch.device) -> None:
        """Forbid cuFile to go through the host, for the whole process: it would not say so.

        Args:
            module: `cuda.bindings.cufile`.
            runtime: `cuda.bindings.runtime`.
            way: how bytes go between GPU and drive.
            device: one that has a context.

        Raises:
            DirectTransferError: cuFile does not start; or it was in use, and may go through the
                host.
        """
        self._module, self._runtime = module, runtime
        with self.on(device), self._said("cuFileDriverOpen"):
            self._forbid_compat()
            with self._open_already():
                module.driver_open()  # reads cufile.json
            version = module.get_version()
            sizes = module.SizeTConfigParameter
            most = module.get_parameter_size_t(sizes.PROPERTIES_IO_BATCHSIZE)
            piece = module.get_parameter_size_t(sizes.PROPERTIES_PER_BUFFER_CACHE_SIZE_KB) * KiB
        self.name = f"cuFile {version // 1000}.{version % 1000 // 10} ({way})"
        self._most = max(1, min(_MOST, most))
        # What is larger takes the host's way; of memory that is not registered, a batch takes
        # 64 KiB less than a buffer of cuFile's.
        piece -= _BATCH_MARGIN
        self.largest_piece = max(PAGE, piece - piece % PAGE)

    def _forbid_compat(self) -> None:
        module = self._module
        compat = module.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE
        with self._open_already():
            module.set_parameter_bool(compat, False)
        if module.get_parameter_bool(compat):
            raise DirectTransferError(
                "cuFile is in use already in this process, and may go through the host (compat) "
                "without saying so: set CUFILE_ALLOW_COMPAT_MODE=false"
            )

    @contextlib.contextmanager
    def _open_already(self) -> Iterator[None]:
        """Let it pass that somebody else in the process opened cuFile."""
        try:
            yield
        except self._module.cuFileError as error:
            if error.status != _ALREADY_OPEN:
                raise

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        """Turn the errors of the bindings into ours."""
        try:
            yield
        except DirectTransferError:
            raise
        except self._module.cuFileError as error:
            raise DirectTransferError(f"{what}: {error}", error.status) from error
        except ValueError as error:  # -1: the bindings find no name for the errno
            raise DirectTransferError(f"{what}: an error of the file system ({error})") from error
        except (AttributeError, RuntimeError) as error:  # a function that the library lacks
            raise DirectTransferError(f"{what}: {error}") from error

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Make a device the calling thread's, as the other calls need it."""
        import torch

        with torch.cuda.device(device):
            # torch leaves a thread without a context whose device it takes to be this one
            (status,) = self._runtime.cudaSetDevice(device.index)
            if int(status):
                raise DirectTransferError(f"cudaSetDevice({device.index}): {status!r}")
            yield

    def open_file(self, fd: int) -> int:
        """Register a descriptor that is open for direct I/O, and return its handle."""
        descr = Descr(_OPAQUE_FD, fd, None)
        with self._said("cuFileHandleRegister"):
            file: int = self._module.handle_register(ctypes.addressof(descr))
        return file

    def close_file(self, file: int) -> None:
        """Forget a handle; nothing is under way."""
        self._module.handle_deregister(file)

    def register(self, address: int, nbytes: int) -> bool:
        """Register device memory; False: it is used as it is."""
        try:
            with self._said("cuFileBufRegister"):
                self._module.buf_register(address, nbytes, 0)
        except DirectTransferError:
            return False  # such memory passes through a buffer of cuFile's on the device
        return True

    def release(self, address: int) -> None:
        """Forget registered memory."""
        with contextlib.suppress(DirectTransferError), self._said("cuFileBufDeregister"):
            self._module.buf_deregister(address)

    def move(self, op: Op, file: int, region: Region, call: Call) -> int:
        """Transfer, and return how many bytes were moved, or a negative status."""
        write = op is Op.WRITE
        function = self._module.write if write else self._module.read
        base, start = _place(region, call)
        with self._said("cuFileWrite" if write else "cuFileRead"):
            moved: int | None = function(file, base, call.size, call.offset, start)
        if moved is None:
            raise DirectTransferError("cuda.bindings.cufile does not tell how much was moved")
        return moved

    def start(self, op: Op, file: int, region: Region, call: Call, stream: int) -> None:
        """Queue a transfer on a stream; the call must stay as it is until the stream is past it."""
        write = op is Op.WRITE
        function = self._module.write_async if write else self._module.read_async
        address, base = ctypes.addressof(call), region.address
        if not region.registered:
            base, call.start = base + call.start, 0
        with self._said("cuFileWriteAsync" if write else "cuFileReadAsync"):
            fields = (getattr(Call, name).offset for name, _ in Call._fields_)
            function(file, base, *(address + at for at in fields), stream)

    def move_batch(self, op: Op, file: int, region: Region, calls: Sequence[Call]) -> None:
        """Transfer pieces of at most `largest_piece` bytes together, and set each call's `moved`.

        Raises:
            DirectTransferError: none was started; or nobody knows, and it is not `settled`.
        """
        while calls:
            self._move_together(op, file, region, calls[: self._most])
            calls = calls[self._most :]

    def _move_together(self, op: Op, file: int, region: Region, calls: Sequence[Call]) -> None:
        module = self._module
        with self._said("cuFileBatchIOSetUp"):
            batch: int = module.batch_io_set_up(len(calls))
        array = (IOParams * len(calls))()  # cuFile reads it until all is over
        for index, (params, call) in enumerate(zip(array, calls, strict=True)):
            params.mode, params.opcode = _BATCH, _OPCODES[op]
            params.file, params.cookie = file, index
            params.base, params.start = _place(region, call)
            params.size, params.file_offset = call.size, call.offset
        try:
            with self._said("cuFileBatchIOSubmit"):
                module.batch_io_submit(batch, len(calls), ctypes.addressof(array), 0)
        except DirectTransferError:
            module.batch_io_destroy(batch)
            raise
        left = len(calls)
        try:
            while left:
                left -= self._reap(batch, calls, left)
        except DirectTransferError as error:
            error.settled = False
            raise
        module.batch_io_destroy(batch)

    def _reap(self, batch: int, calls: Sequence[Call], left: int) -> int:
        """Wait for transfers of a batch; return how many are over."""
        count, events = ctypes.c_uint(left), (IOEvents * left)()
        wait = Timespec(_PATIENCE, 0)  # NVIDIA does not say what none would mean
        with self._said("cuFileBatchIOGetStatus"):
            self._module.batch_io_get_status(
                batch, 1, *map(ctypes.addressof, (count, events, wait))
            )
        over = 0
        for event in events[: count.value]:
            if event.status & _UNKNOWN:
                text = f"cuFile gave a transfer of a batch up (status {event.status})"
                raise DirectTransferError(text)
            if event.status & _OVER:
                failed = event.status != _COMPLETE
                call = calls[event.cookie or 0]  # a null pointer is None
                call.moved = min(event.moved, -1) if failed else event.moved
                over += 1
        return over

    def describe(self, status: int) -> str:
        """Return what a negative status means."""
        if status == -1:
            return "an error of the file system"
        with contextlib.suppress(Exception):  # a number that the library does not know
            return f"{self._module.op_status_error(-status)} ({-status})"
        return f"status {-status}"


def _place(region: Region, call: Call) -> tuple[int, int]:
    """Return base and offset: cuFile takes an offset in registered memory only."""
    if region.registered:
        return region.address, call.start
    return region.address + call.start, 0
