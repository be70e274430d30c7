"""Under a hostile loop every file is the state at its call, bit for bit."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hostile import Hostile
from support.beside import OPTIMIZERS

import fastserial
from fastserial.engines.threads import ThreadsEngine
from fastserial.overlap.snapshot import Snapshot


class Unsteady(ThreadsEngine):
    """Takes its time now and then, so that saves of a few MB last."""

    name = "unsteady"

    def submit(self, requests: Any) -> None:
        if random.random() < 0.2:
            time.sleep(0.001)
        super().submit(requests)


def unsteady(threads: int) -> Unsteady:
    return Unsteady(threads)


def run(folder: Path, dice: random.Random, optimizer: str, trials: int) -> Hostile:
    with fastserial.options(
        engine=unsteady, small_file=65536, block_size=65536, queue_depth=2, durable=False
    ):
        loop = Hostile(folder, optimizer, dice)
        for _ in range(trials):
            loop.save(disturb=dice.random() < 0.4)
    return loop


@pytest.mark.trials(12, 250)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_file_is_torn(tmp_path: Path, dice: random.Random, trials: int, optimizer: str) -> None:
    outcome = run(tmp_path, dice, optimizer, trials).outcome
    print(optimizer, outcome)
    assert outcome.counts == {"saved": trials}
    assert outcome.kinds["copy"]


@pytest.mark.trials(40, 400)
@pytest.mark.timeout(3600)
def test_without_copies_files_are_torn(
    tmp_path: Path, dice: random.Random, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Snapshot, "take", lambda self, parts: None)
    counts: Counter[str] = Counter()
    while not counts["WRONG"] and counts.total() < trials:
        counts += run(tmp_path, dice, "adam", 5).outcome.counts
    assert counts["WRONG"], counts


def test_it_trains_on_another_thread(tmp_path: Path, dice: random.Random) -> None:
    found: list[Hostile] = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path, dice, "adamw", 5)))
    thread.start()
    thread.join(120)
    assert found[0].outcome.counts["WRONG"] == 0
