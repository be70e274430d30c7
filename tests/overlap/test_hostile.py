"""Under a hostile loop every file is the state at its call, bit for bit."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest
from support.hostile import OPTIONS, Hostile, layers, without_copies
from support.unstepped import OPTIMIZERS

import fastserial
from fastserial.checkpoints.save import write
from fastserial.training.objects import state_of, states

WIDTH = 400  # a weight has 625 KiB: more than is copied in any case


def run(folder: Path, dice: random.Random, optimizer: str, trials: int) -> Counter[str]:
    model = layers(WIDTH)
    made = OPTIMIZERS[optimizer](model.parameters())
    with fastserial.options(**OPTIONS):
        loop = Hostile(
            *(folder, model, made, dice),
            save=lambda objects, path: write(states(objects, state_of), str(path)),
            begin=lambda objects, path, budget: fastserial.save_async(
                states(objects, state_of), path, snapshot_budget=budget
            ),
        )
        for _ in range(trials):
            loop.save()
    return loop.counts


@pytest.mark.trials(8, 250)
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
    assert counts == {"saved": trials}


@pytest.mark.trials(40, 400)
@pytest.mark.timeout(3600)
def test_without_copies_files_are_torn(
    tmp_path: Path, dice: random.Random, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_copies(monkeypatch)
    counts: Counter[str] = Counter()
    while not counts["wrong"] and counts.total() < trials:
        counts += run(tmp_path, dice, "adam", 5)
    assert counts["wrong"], counts
