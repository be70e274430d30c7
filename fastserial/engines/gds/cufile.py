"""cuFile (GPUDirect Storage) by `cuda.bindings.cufile`, as NVIDIA documents both.

What has run on a GPU is in docs/guide/gpu.md. `missing` calls nothing of cuFile, whose
`cuFileDriverOpen` was seen not to return where there is no driver. The rest is for processes that
have tensors on a GPU, and so a context.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from fastserial.engines import Op
from fastserial.interrupts import ours, suppress

if TYPE_CHECKING:
    import torch


_PACKAGE = "cuda.bindings"
_ALREADY_OPEN = 5026  # CU_FILE_DRIVER_ALREADY_OPEN
_OPAQUE_FD = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD


class DirectTransferError(OSError):
    """A transfer past the host failed; the bytes can still pass through the host.

    Attributes:
        status: the driver's own number for it; 0: none, or an error of the file system.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(errno.EIO, message)
        self.status = status

    def __str__(self) -> str:
        return str(self.strerror)


class FileDescription(ctypes.Structure):
    """`CUfileDescr_t`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle", ctypes.c_void_p),  # a union, of `int fd`
        ("fs_ops", ctypes.c_void_p),
    )


def missing() -> str | None:
    """Return why cuFile cannot be used on this machine, or None. Calls nothing of it."""
    import torch

    if torch.version.cuda is None:
        return "cuFile needs a torch that is built for CUDA"
    if not torch.cuda.is_available():
        return "cuFile needs a GPU, and torch sees none"
    for name in ("cuda", "numpy"):
        if importlib.util.find_spec(name) is None:
            return "cuFile needs the packages cuda-bindings (13.1 or later) and numpy"
    return None


def serves(device: torch.device) -> bool:
    """Return whether cuFile moves the memory of a device."""
    return device.type == "cuda"


class _Refusal(NamedTuple):
    """Why this process has no cuFile, and the status of that."""

    text: str
    status: int


# By process: a forked child's is another. A refusal is kept, too: it takes cuFile half a second, in
# which it waits for all streams of the device (seen with 1.15).
_drivers: dict[int, CuFile | _Refusal] = {}


def may_serve() -> bool:
    """Return whether this process may come to use cuFile, as far as is known before it does."""
    return missing() is None and not isinstance(_drivers.get(os.getpid()), _Refusal)


def open_driver(device: torch.device) -> CuFile:
    """Return cuFile for a device that has a context; nothing is `missing`.

    Raises:
        DirectTransferError: it cannot be loaded, or its compatibility mode cannot be forbidden.
    """
    found = _drivers.get(os.getpid())
    if found is None:
        # another thread may do the same; the first result stays
        found = _drivers.setdefault(os.getpid(), _open(device))
    if isinstance(found, _Refusal):
        raise DirectTransferError(*found)
    return found


def _open(device: torch.device) -> CuFile | _Refusal:
    try:
        module = importlib.import_module(f"{_PACKAGE}.cufile")
        runtime = importlib.import_module(f"{_PACKAGE}.runtime")
    except ours(Exception) as error:  # a library that is not there is no ImportError
        return _Refusal(f"cuFile cannot be loaded: {error}", 0)
    try:
        return CuFile(module, runtime, device)
    except ours(DirectTransferError) as error:
        return _Refusal(str(error), error.status)


class CuFile:
    """cuFile in this process. Any thread may call it, several at once.

    It knows files by handles of its own and device memory by addresses. All calls raise
    `DirectTransferError` where cuFile refuses or fails.

    Attributes:
        name: with its version.
    """

    def __init__(self, module: Any, runtime: Any, device: torch.device) -> None:
        """Forbid cuFile its compatibility mode, for the whole process: it would not report it.

        Args:
            module: `cuda.bindings.cufile`.
            runtime: `cuda.bindings.runtime`.
            device: one that has a context.

        Raises:
            DirectTransferError: cuFile does not start; or it was in use, and its compatibility
                mode is allowed.
        """
        self._module, self._runtime = module, runtime
        compat = module.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE
        with self.on(device), self._translated("cuFileDriverOpen"):
            with self._open_already():
                module.set_parameter_bool(compat, False)
            if module.get_parameter_bool(compat):
                raise DirectTransferError(
                    "cuFile is in use already in this process, and may copy through the "
                    "host (compat) without a report: set CUFILE_ALLOW_COMPAT_MODE=false"
                )
            with self._open_already():
                module.driver_open()  # reads cufile.json
            version = module.get_version()
        self.name = f"cuFile {version // 1000}.{version % 1000 // 10}"

    @contextlib.contextmanager
    def _open_already(self) -> Iterator[None]:
        """Ignore that other code in the process opened cuFile."""
        try:
            yield
        except ours(self._module.cuFileError) as error:
            if error.status != _ALREADY_OPEN:
                raise

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Translate the errors of the bindings."""
        try:
            yield
        except DirectTransferError:
            raise
        except ours(self._module.cuFileError) as error:
            raise DirectTransferError(f"{what}: {error}", error.status) from error
        except ours(ValueError) as error:  # -1: the bindings find no name for the errno
            raise DirectTransferError(f"{what}: an error of the file system ({error})") from error
        except ours(AttributeError, RuntimeError) as error:  # a function that the library lacks
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
        descr = FileDescription(_OPAQUE_FD, fd, None)
        with self._translated("cuFileHandleRegister"):
            file: int = self._module.handle_register(ctypes.addressof(descr))
        return file

    def close_file(self, file: int) -> None:
        """Deregister a handle; no transfer uses it."""
        self._module.handle_deregister(file)

    def register(self, address: int, nbytes: int) -> None:
        """Register device memory for transfers."""
        with self._translated("cuFileBufRegister"):
            self._module.buf_register(address, nbytes, 0)

    def release(self, address: int) -> None:
        """Forget registered memory."""
        with suppress(DirectTransferError), self._translated("cuFileBufDeregister"):
            self._module.buf_deregister(address)

    def move(self, op: Op, file: int, address: int, start: int, nbytes: int, offset: int) -> int:
        """Transfer, and return how many bytes were moved.

        Args:
            op: from or to the device.
            file: the handle of the file.
            address, start, nbytes: registered memory, and so many bytes from its byte `start` on.
            offset: in the file (bytes).
        """
        write = op is Op.WRITE
        with self._translated("cuFileWrite" if write else "cuFileRead"):
            function = self._module.write if write else self._module.read
            moved: int | None = function(file, address, nbytes, offset, start)
        if moved is None:  # before cuda-bindings 13.1
            raise DirectTransferError("cuda.bindings.cufile does not return how much was moved")
        if moved < 0:
            what = "an error of the file system"
            if moved != -1:
                what = f"{self._module.op_status_error(-moved)} ({-moved})"
            raise DirectTransferError(f"{self.name}: {what}", -moved)
        return moved
