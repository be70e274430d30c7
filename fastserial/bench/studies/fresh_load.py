"""One load in a process of its own, as a program that resumes from a checkpoint does it.

Memory that was used before is cheaper than new memory, and huge pages that one row asked for stay
with the process: in a shared process each row would measure the rows before it, too. The processes
are forked from a server that has imported torch and fastserial, so imports are in no time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import fingerprints
from fastserial.bench.measuring.measure import Usage, measure
from fastserial.bench.subjects.readers import HOST, Files, Reader, Shapes, readers
from fastserial.patching import load_hooks  # noqa: F401  (what the first load would import)
from fastserial.reports import Latency, last_load_report

__all__ = ["Loaded", "Task", "load_afresh"]


@dataclass(frozen=True, slots=True)
class Task:
    """What to load: a row's name, and what `readers` makes its reader from.

    Attributes:
        compare: also return fingerprints of what was loaded.
        device: where to load to.
    """

    row: str
    files: Files
    shapes: Shapes
    compare: bool = False
    device: str = HOST


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one load took.

    Attributes:
        was_there: bytes of the data had memory before (tensors that are filled), or none of the
            host's.
        latency, fallback: as fastserial reports them.
        fingerprints: of what was loaded; None if not asked for.
    """

    usage: Usage
    was_there: bool
    latency: Latency | None
    fallback: str | None
    fingerprints: Mapping[str, str] | None


def load_afresh(task: Task) -> Loaded:
    """Load in a new process.

    Raises:
        BenchError: the load failed, or the process died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    _start_server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(task, theirs), daemon=True)
    process.start()
    theirs.close()
    found: Loaded | str | None = None
    try:
        found = ours.recv()
    except EOFError:
        pass
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
        ours.close()
    if isinstance(found, Loaded):
        return found
    raise BenchError(f"{task.row}: {found or f'its process died, exit code {process.exitcode}'}")


def _start_server() -> None:
    """Start the server of the processes. Like them it ignores Ctrl-C: the parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


# -- in the new process --------------------------------------------------------------------------


def _serve(task: Task, answer: Connection[Loaded | str, Any]) -> None:
    found: Loaded | str
    gc.freeze()  # a collection would copy every page that is shared with the server
    try:
        found = _load(task)
    except BaseException as error:  # reported to the parent
        found = "".join(traceback.format_exception_only(error)).strip()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        answer.send(found)


def _load(task: Task) -> Loaded:
    rows, _ = readers(task.files, task.shapes, task.device)
    reader = next(one for one in rows if one.name == task.row)
    for module in reader.modules:
        importlib.import_module(module)
    _wait_for(task.device)  # its context begins here
    given = reader.prepare()
    kept: list[Any] = []

    def load() -> None:
        kept.append(reader.load(given))
        _wait_for(task.device)

    with reader.context():
        usage = measure(load)
    latency, fallback = _reported(reader)
    found = fingerprints(kept[0]) if task.compare else None
    was_there = given is not None or task.device != HOST
    return Loaded(usage, was_there, latency, fallback, found)


def _wait_for(device: str) -> None:
    """Wait for all that a device has to do."""
    if device != HOST:
        wait: Any = torch.cuda.synchronize
        wait()


def _reported(reader: Reader) -> tuple[Latency | None, str | None]:
    report = last_load_report() if reader.group == "torch" else None
    return (None, None) if report is None else (report.complete, report.fallback)
