"""`fastserial tune`: real saves to a folder, with this setting and that."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch

from fastserial import __version__, engines
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import digest
from fastserial.bench.measuring.machine import describe_folder
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.studies.tune import Space, Verdict, compare, search
from fastserial.bench.subjects.payload import mixed_state
from fastserial.bench.subjects.saving import check_torch
from fastserial.bench.subjects.torch_rows import fast_row, stock_row
from fastserial.config import Config
from fastserial.diagnosis.folder import folder_problem, probe_folder
from fastserial.errors import EngineUnavailableError
from fastserial.files.device_id import device_key
from fastserial.files.meminfo import meminfo
from fastserial.reports import format_bytes
from fastserial.tuning import lookup
from fastserial.tuning.store import Entry, Settings, remember

__all__ = ["LEAST_BYTES", "Tuned", "tune_folder"]

LEAST_BYTES = 16 << 20  # less says nothing about a disk
_TENSORS = 100
_SHARE = 4  # at most 1/4 of the free space and memory is used
_SAVES = 60  # there should be time for
_PAUSE = 0.05
_COPIES = 2
_SEARCH = 0.5  # part of the time that the search may take at least
_SAVES_PER_PAIR = 2


@dataclass(frozen=True, slots=True)
class Tuned:
    """What `tune` did.

    Attributes:
        default, candidate: settings; the candidate is the default if nothing was faster.
        verdict: of the final pairs; None if there was no candidate.
        nbytes: of each save.
        saves, tried: how many were made, and with how many different settings.
        seconds: it all took.
        device, key: description of the device, and its key in the file.
        file: where the result is kept.
    """

    default: Settings
    candidate: Settings
    verdict: Verdict | None
    nbytes: int
    saves: int
    tried: int
    seconds: float
    device: str
    key: str
    file: Path


class _Saver:
    """Makes durable saves of one state dict, and counts them."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        self._folder = folder
        self._state = state
        self.saves = 0
        self.tried: set[Settings] = set()

    def seconds(self, settings: Settings) -> float:
        """Save to a new file; infinity where the engine cannot."""
        path = self._folder / f"tune.{self.saves}"
        self.saves += 1
        self.tried.add(settings)
        settle(_PAUSE)
        row = fast_row(self._state, "zip", tuned=False, **settings.options())
        try:
            return row.run(path).seconds
        except EngineUnavailableError:
            return math.inf
        finally:
            path.unlink(missing_ok=True)

    def check(self, settings: Settings) -> None:
        """Raise if a save with these settings is not what stock torch writes."""
        paths = [self._folder / f"same.{name}" for name in ("stock", "tuned")]
        stock_row(self._state, "zip").run(paths[0])
        fast_row(self._state, "zip", tuned=False, **settings.options()).run(paths[1])
        same = digest(paths[0]) == digest(paths[1])
        for path in paths:
            path.unlink()
        if not same:
            raise BenchError(f"with {settings} the file is not the one stock torch writes")


def tune_folder(
    folder: Path,
    most_bytes: int,
    seconds: float,
    pairs: int,
    on_progress: Callable[[float, str], None] = lambda done, text: None,
    space: Space | None = None,
) -> Tuned:
    """Find the best settings for a folder's device and keep them; the defaults if none are better.

    Args:
        folder: where to save to.
        most_bytes: of a save; less where the disk is slow, or space or memory short.
        seconds: about how long it may take; on a slow disk the final pairs may take longer.
        pairs: of the final comparison.
        on_progress: receives the part that is done (0 to 1) and what is being tried.
        space: what to try; by default everything that can run here.

    Raises:
        BenchError: there is too little space or memory, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed, or the result cannot be kept.
    """
    began = monotonic()
    check_torch()
    default = Settings.of(Config())
    state = mixed_state(_room(folder, most_bytes), _TENSORS)
    with scratch(folder, 0) as place:
        on_progress(0.0, "warming up")
        saver = _Saver(place, state)
        saver.seconds(default)
        cycle = _time(lambda: saver.seconds(default))
        wanted = int(_nbytes(state) * seconds / _SAVES / cycle)
        if wanted < _nbytes(state):
            state = mixed_state(max(LEAST_BYTES, wanted), _TENSORS)
            saver = _Saver(place, state)
            cycle = _time(lambda: saver.seconds(default))
        final = pairs * _SAVES_PER_PAIR * cycle
        until = began + max(seconds * _SEARCH, seconds - final)

        def say(text: str) -> None:
            on_progress(min(0.99, (monotonic() - began) / seconds), text)

        candidate = search(
            saver.seconds, default, space or _space(), lambda: monotonic() > until, say
        )
        verdict = None
        if candidate != default:
            verdict = compare(saver.seconds, default, candidate, pairs, say)
            if verdict.accepted:
                say("comparing the file with stock torch's")
                saver.check(candidate)
    settings = candidate if verdict is not None and verdict.accepted else None
    device, key, file = _keep(folder, settings, verdict, _nbytes(state))
    return Tuned(
        default,
        candidate,
        verdict,
        _nbytes(state),
        saver.saves,
        len(saver.tried),
        monotonic() - began,
        device,
        key,
        file,
    )


def _time(call: Callable[[], object]) -> float:
    began = monotonic()
    call()
    return monotonic() - began


def _keep(
    folder: Path, settings: Settings | None, verdict: Verdict | None, nbytes: int
) -> tuple[str, str, Path]:
    """Keep the result; return the device's description, its key, and the file."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        key = device_key(fd)
    finally:
        os.close(fd)
    device = describe_folder(probe_folder(folder))
    entry = Entry(
        settings=settings,
        folder=str(folder.absolute()),
        device=device,
        gain=verdict.gain if verdict else None,
        pairs=len(verdict.ratios) if verdict else 0,
        nbytes=nbytes,
        when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        fastserial=__version__,
    )
    file = remember(key, entry)
    lookup.forget_cache()
    return device, key, file


def _space() -> Space:
    """Return what to try with the engines that can run here."""
    return Space(tuple(engine.name for engine in engines.survey() if engine.missing is None))


def _room(folder: Path, wanted: int) -> int:
    """Return the bytes that a save may have, at most `wanted`.

    Raises:
        BenchError: too few for a result that means something.
    """
    problem = folder_problem(folder)
    if problem is not None:
        raise BenchError(problem)
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    memory = meminfo().get("MemAvailable", wanted * _SHARE)
    room = min(wanted, free // (_SHARE * _COPIES), memory // _SHARE)
    if room < LEAST_BYTES:
        raise BenchError(
            f"a save of {format_bytes(room)} says nothing: {format_bytes(LEAST_BYTES)} are the "
            f"least; 1/{_SHARE * _COPIES} of the {format_bytes(free)} free in {folder} and "
            f"1/{_SHARE} of the {format_bytes(memory)} of memory are the most"
        )
    return room


def _nbytes(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())
