"""Under a hostile loop every file is the state at its call, bit for bit, or the save raised."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.beside import OPTIMIZERS
from support.hostile import OPTIONS, Hostile, layers, without_guards

import fastserial
from fastserial.checkpoints.save import write
from fastserial.overlap.asynchronous import start_save
from fastserial.training.object_states import state_of, states, steady

WIDTH = 400  # a weight has 625 KiB: more than is copied in any case


def begin(objects: Any, path: Path, kind: Any, budget: Any, disturb: bool) -> Any:
    inert = None if disturb else steady(objects)  # as a Checkpointer does
    return start_save(states(objects, state_of), path, kind, budget, steady=inert)


def run(folder: Path, dice: random.Random, optimizer: str, trials: int) -> Counter[str]:
    model = layers(WIDTH)
    made = OPTIMIZERS[optimizer](model.parameters())
    with fastserial.options(**OPTIONS):
        loop = Hostile(
            *(folder, model, made, dice),
            save=lambda objects, path: write(states(objects, state_of), str(path)),
            begin=begin,
        )
        for _ in range(trials):
            loop.save()
    return loop.counts


@pytest.mark.trials(12, 250)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_file_is_torn(tmp_path: Path, dice: random.Random, trials: int, optimizer: str) -> None:
    found: list[Counter[str]] = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path, dice, optimizer, trials)))
    if optimizer == "adamw":  # it trains on another thread
        thread.start()
        thread.join()
    else:
        thread.run()
    (counts,) = found
    print(optimizer, dict(counts))
    assert counts["wrong"] == 0
    assert counts["saved"] + counts["torn"] == trials
    assert counts["saved"] > trials // 4


@pytest.mark.trials(40, 400)
@pytest.mark.timeout(3600)
def test_without_the_guards_files_are_torn(
    tmp_path: Path, dice: random.Random, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_guards(monkeypatch)
    counts: Counter[str] = Counter()
    while not counts["wrong"] and counts.total() < trials:
        counts += run(tmp_path, dice, "adam", 5)
    assert counts["wrong"], counts
