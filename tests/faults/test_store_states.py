"""Every state of an object store that a run may leave: an object is there whole, or it is not.

The host and its disk are gone: what resumes has nothing but the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastserial
from fastserial.files.remote import remote_folder
from fastserial.training import mirror

pytest.importorskip("obstore")
Objects = dict[str, bytes]


class Watched:
    """A remote folder that is a local one, and what there was after each change (`states`)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.url = folder.as_uri()
        self._folder = folder
        self._real = remote_folder(self.url, 10.0, create=True)
        self.states: list[Objects] = [{}]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def objects(self) -> Objects:
        return {path.name: path.read_bytes() for path in self._folder.iterdir()}

    def put(self, name: str, chunks: Iterable[bytes], nbytes: int) -> None:
        self._real.put(name, chunks, nbytes)
        self.states.append(self.objects())

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects: any of them first."""
        before = self.objects()
        there = [name for name in names if name in before]
        for count in range(1, len(there) + 1):
            for gone in itertools.combinations(there, count):
                self.states.append({key: one for key, one in before.items() if key not in gone})
        self._real.remove(there)


def run(
    folder: Path, store: Watched, patch: pytest.MonkeyPatch, steps: range, twice: bool = False
) -> None:
    """Save steps; `twice`: the last one is found before it is added, as a run that begins may."""
    patch.setattr(mirror, "remote_folder", lambda *_, **__: store)
    weight = torch.zeros(1000)
    with fastserial.Checkpointer(folder, {"weight": weight}, keep=2, mirror=store.url) as saver:
        saver.resume()
        for step in steps:
            weight.fill_(step)
            saver.save(step)
            saver.wait()
        if twice:
            made: Any = saver._mirror
            made.close()
            made.add(steps[-1], {}, bool)


def resumed(folder: Path, objects: Objects, patch: pytest.MonkeyPatch) -> Any:
    """Return the step from which a run goes on that has the store alone, or the error."""
    patch.undo()
    remote = folder / "remote"
    remote.mkdir(parents=True)
    for name, data in objects.items():
        (remote / name).write_bytes(data)
    weight = torch.zeros(1000)
    try:
        with fastserial.Checkpointer(
            folder / "run", {"weight": weight}, mirror=remote.as_uri()
        ) as saver:
            step = saver.resume()
    except (OSError, fastserial.FastserialError) as error:
        return type(error).__name__
    return step if bool((weight == step).all()) else "a mixture"


def problems(folder: Path, patch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Return the number of states, and what is wrong with any: a run goes back."""
    store = Watched(folder / "remote")
    run(folder / "run", store, patch, range(1, 5))
    run(folder / "again", store, patch, range(5, 7), twice=True)
    newest, distinct, wrong = 0, [], []
    for number, objects in enumerate(store.states):
        if objects in distinct:
            continue
        distinct.append(objects)
        step = resumed(folder / f"resumed{number}", objects, patch)
        if isinstance(step, int) and step >= newest:
            newest = step
        else:
            wrong.append(f"{step} after {newest}, with {sorted(objects)}")
    if newest != 6:
        wrong.append(f"{newest} in the end")
    return len(distinct), wrong


def test_a_run_never_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, wrong = problems(tmp_path, monkeypatch)
    print(f"| mirror of a `Checkpointer` | an object store | {count} |")
    assert count > 12
    assert not wrong, wrong[0]


def test_what_is_removed_too_early_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the checkpoints before are removed first."""
    upload = mirror.Mirror._upload

    def remove_first(self: mirror.Mirror, step: int, metrics: Any) -> dict[str, int]:
        self._remote.remove(self._remote.sizes())
        return upload(self, step, metrics)

    monkeypatch.setattr(mirror.Mirror, "_upload", remove_first)
    _, wrong = problems(tmp_path, monkeypatch)
    assert wrong
    print(wrong[0])
