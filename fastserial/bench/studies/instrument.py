"""Hooks around the steps of a save, there only while a save is profiled.

The code of a save knows nothing of this: its functions are replaced by ones that note the time,
and given back afterwards. What the threads of an engine do is told by the requests themselves.
"""

from __future__ import annotations

import contextlib
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from fastserial import checksums
from fastserial.bench.studies.spans import Recorder
from fastserial.engines import Completion, Engine, Request, create
from fastserial.files import linux, replacement
from fastserial.memory import storages
from fastserial.patching import save_hooks
from fastserial.saving import archive, block_writer, fill, torch_writer, writer

__all__ = ["IN_FLIGHT", "WORK", "WRITE", "instrumented", "recording_pickle"]

WRITE = "device write"
WORK = "fill (rest)"
IN_FLIGHT = "blocks in flight"

# What is hooked, and what its own time (without hooked functions it calls) is called.
_STEPS: tuple[tuple[Any, str, str], ...] = (
    (save_hooks, "target_of", "open target"),
    (replacement.Replacement, "__init__", "open target"),
    (archive.ZipArchive, "write_record", "layout"),
    (archive.ZipArchive, "add_storages", "layout"),
    (torch_writer, "finish", "layout"),
    (writer, "storage_extents", "layout"),
    (writer, "synchronize", "wait for the GPU"),
    (archive, "synchronize", "wait for the GPU"),
    (linux, "preallocate", "preallocate"),
    (block_writer.BlockWriter, "put", "cut into blocks"),
    (block_writer.BlockWriter, "_open", "start engine"),
    (block_writer.BlockWriter, "_write_cached", "write tail (page cache)"),
    (block_writer.BlockWriter, "close", "stop engine"),
    (storages.StorageOnHost, "copy_to", "copy"),
    (storages.StorageMemory, "copy_to", "copy from the device (D2H)"),
    (fill, "_fill_packed", "pack small storages"),
    (fill, "crc32", "CRC-32"),
    (checksums.CrcLedger, "wait", "wait for checksums"),
    (checksums.CrcLedger, "wait_all", "wait for checksums"),
    (replacement.Replacement, "sync", "fsync"),
    (replacement.Replacement, "commit", "rename"),
    (replacement.Replacement, "_sync_directory", "directory sync"),
)


@contextlib.contextmanager
def instrumented(recorder: Recorder) -> Iterator[None]:
    """Record the steps of the saves made meanwhile, by any thread of this process."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in _STEPS:
            function = getattr(owner, attribute)
            _swap(stack, owner, attribute, recorder.wrap(name, function))
        _swap(stack, block_writer, "create", lambda *args: _observed(create(*args), recorder))
        yield


def _swap(stack: contextlib.ExitStack, owner: Any, attribute: str, new: Any) -> None:
    stack.callback(setattr, owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, new)


def _observed(engine: Engine, recorder: Recorder) -> Engine:
    """Hook one engine's calls, and the preparation of each of its requests."""
    submit, wait = engine.submit, engine.wait
    in_flight = 0

    def note(change: int) -> None:
        nonlocal in_flight
        in_flight += change
        recorder.levels.append((perf_counter(), in_flight))

    def observed_submit(requests: Sequence[Request]) -> None:
        note(len(requests))
        for request in requests:
            request.prepare = _observed_prepare(request.prepare, recorder)
        recorder.call("submit", submit, requests)

    def observed_wait(minimum: int) -> list[Completion]:
        found: list[Completion] = recorder.call("wait for blocks", wait, minimum)
        note(-len(found))
        for completion in found:
            request = completion.request
            _, started, done = request.times
            # an engine without threads of ours writes while others work: no thread's time
            if request.mover and done > started:
                recorder.add(WRITE, request.mover, started, done)
        return found

    for name, function in (("submit", observed_submit), ("wait", observed_wait)):
        setattr(engine, name, function)
    return engine


def _observed_prepare(
    prepare: Callable[[Request], None] | None, recorder: Recorder
) -> Callable[[Request], None]:
    def observed(request: Request) -> None:
        if prepare is not None:
            recorder.call(WORK, prepare, request)

    return observed


def recording_pickle(recorder: Recorder) -> types.ModuleType:
    """Return the module `pickle`, for `torch.save`, with a pickler that records its time."""

    class Pickler(pickle.Pickler):
        def dump(self, obj: Any) -> None:
            recorder.call("pickle", super().dump, obj)

    module = types.ModuleType("pickle")
    module.__dict__.update(vars(pickle))
    module.__dict__["Pickler"] = Pickler
    return module
