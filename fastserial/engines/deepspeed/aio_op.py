"""DeepSpeed's compiled `async_io` op: whether it can run here, and its handles.

`missing` does not import DeepSpeed and builds nothing. Handles are kept for the next file: making
one takes under a millisecond, freeing one tens of milliseconds per thread (`io_destroy` waits for
a grace period of the kernel).
"""

from __future__ import annotations

import atexit
import ctypes
import glob
import importlib
import importlib.util
import os
import shutil
import sys
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fastserial.errors import EngineUnavailableError
from fastserial.interrupts import Locked

MiB = 1024 * 1024
BUILD_COMMAND = (
    'python -c "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"'
)
_OP = "async_io"


@dataclass(frozen=True, slots=True)
class AioSettings:
    """The arguments of DeepSpeed's `aio_handle`.

    Attributes:
        block_size: bytes of one kernel request.
        queue_depth: kernel requests in flight per thread.
        single_submit: one system call per request instead of one per batch.
        overlap_events: submit more while earlier requests run.
        intra_op_parallelism: threads each transfer is divided among.
    """

    block_size: int = 1 * MiB
    queue_depth: int = 32
    single_submit: bool = False
    overlap_events: bool = True
    intra_op_parallelism: int = 4

    @classmethod
    def of(cls, handle: Any) -> AioSettings:
        """Return the settings of an `aio_handle`."""
        return cls(*(getattr(handle, f"get_{field.name}")() for field in fields(cls)))


def missing() -> list[str]:
    """Return what prevents the op from running here, each with the command that helps."""
    found = importlib.util.find_spec("deepspeed")
    # an unrelated folder of that name has no origin
    if found is None or found.origin is None or not found.submodule_search_locations:
        return ["DeepSpeed is not installed: pip install deepspeed"]
    problems: list[str] = []
    if not _loads("libaio.so.1"):
        problems.append("libaio.so.1 is not installed: apt-get install libaio-dev")
    if any(Path(found.submodule_search_locations[0], "ops", "aio").glob("async_io_op*.so")):
        return problems
    # DeepSpeed compiles at first use, and torch's extension loader runs both tools at each load.
    if shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None:
        problems.append("g++ or ninja is not installed: apt-get install g++; pip install ninja")
    if not glob.glob(os.path.join(_extensions(), _OP, f"{_OP}.so")):
        problems.append(
            "the op is not built yet (once, about 10 CPU minutes): apt-get install libaio-dev, and "
            + BUILD_COMMAND
        )
    return problems


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _extensions() -> str:
    """Return a pattern of the folders where torch's extension loader puts libraries."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return glob.escape(root)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_*"
    return os.path.join(glob.escape(cache), "torch_extensions", version)


def load_op() -> Any:
    """Import DeepSpeed's op.

    Raises:
        EngineUnavailableError: it cannot be loaded; with the reason.
    """
    problems = missing()
    if problems:
        raise EngineUnavailableError("; ".join(problems))
    try:
        builders = importlib.import_module("deepspeed.ops.op_builder")
        return builders.AsyncIOBuilder().load(verbose=False)
    except (ImportError, RuntimeError, OSError) as error:
        raise EngineUnavailableError(
            f"DeepSpeed's async_io op does not load: {error}. Build it again: {BUILD_COMMAND}"
        ) from error


_idle: defaultdict[AioSettings, list[Any]] = defaultdict(list)
_lock = threading.RLock()  # a signal handler may come while its thread holds it


def borrow_handle(settings: AioSettings) -> Any:
    """Return a handle with nothing in flight, for the caller alone until `give_back`.

    Raises:
        EngineUnavailableError: the op cannot be loaded.
    """
    with Locked(_lock):
        if _idle[settings]:
            return _idle[settings].pop()
    return load_op().aio_handle(**asdict(settings))


def give_back(settings: AioSettings, handle: Any) -> None:
    """Keep a handle, with nothing in flight, for the next write."""
    with Locked(_lock):
        _idle[settings].append(handle)


def write(settings: AioSettings, memory: Any, fd: int, offset: int) -> None:
    """Write a tensor; DeepSpeed does not report whether that succeeded.

    The number of bytes is divisible by the handle's threads. No signal handler interrupts the
    calling thread. DeepSpeed logs a warning at the first write of a process: it then needs the
    interpreter's lock while other writes, whose threads hold that lock, wait for it to end.
    """
    handle = borrow_handle(settings)
    with Locked(_lock):
        handle.async_pwrite(memory, fd, offset)
    handle.wait()
    give_back(settings, handle)


def _forget() -> None:
    """In a forked child: the handles' threads are not there, and freeing would wait for them."""
    global _lock
    _lock = threading.RLock()
    for handles in _idle.values():
        for handle in handles:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_idle.clear)
