"""Checkpointer against a model: what a blocking torch.save of the same objects would have left.

Chance decides what the state holds, what changes between `save` and `wait`, and what is killed,
damaged and resumed; see `support.lives`. `FASTSERIAL_FAULTS=full` runs many more examples.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from support import ranks
from support.beside import Gate
from support.damage import DAMAGES
from support.forms import FULL
from support.hostile import without_copies
from support.lives import BUDGETS, CHANGES, CONTROLS, Life, Spec, Wrong, slowly

from fastserial import Checkpointer

SPECS = st.integers(0, 2**31).map(lambda seed: Spec.of(random.Random(seed)))
SEEDS = st.integers(0, 999)
NAMES = st.sampled_from(CHANGES)
MANY = settings(
    max_examples=1000 if FULL else 50,
    stateful_step_count=25 if FULL else 14,
    deadline=None,
    derandomize=not FULL,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink] if FULL else [Phase.generate],
)


class Machine(RuleBasedStateMachine):
    """The events of one folder."""

    checkpointer: Callable[..., Checkpointer] = Checkpointer
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="fastserial-model-"))
        self.gate = Gate(0.03)
        self.options = slowly(self.gate)
        self.options.__enter__()
        self.life: Life | None = None

    @initialize(spec=SPECS, budget=st.sampled_from(BUDGETS))
    def begin(self, spec: Spec, budget: int | None) -> None:
        self.life = Life(self.folder, spec, budget, checkpointer=type(self).checkpointer)
        self.life.gate = self.gate

    @rule(name=NAMES, seed=SEEDS)
    def change(self, name: str, seed: int) -> None:
        self.life.change(name, seed)

    @rule(gap=st.integers(1, 2), name=NAMES, seed=SEEDS)
    def save_and_change(self, gap: int, name: str, seed: int) -> None:
        self.life.save(gap)
        self.life.change(name, seed)

    @rule(gap=st.integers(1, 2))
    def save(self, gap: int) -> None:
        self.life.save(gap)

    @rule()
    def wait(self) -> None:
        self.life.wait()

    @rule(how=st.sampled_from(DAMAGES), seed=SEEDS)
    def damage(self, how: str, seed: int) -> None:
        self.life.damage(how, random.Random(seed))

    @rule(delay=st.sampled_from([0, 0.0005, 0.002, 0.01]), seed=SEEDS)
    def crash(self, delay: float, seed: int) -> None:
        self.life.crash(delay, seed)

    @rule(seed=SEEDS)
    def resume(self, seed: int) -> None:
        self.life.resume(seed)

    def teardown(self) -> None:
        try:
            if self.life is not None:
                self.life.end()
                type(self).counts += self.life.counts
        finally:
            self.gate.open.set()
            if self.life is not None:
                self.life.checkpointer._last = None
                self.life.checkpointer.close()
            self.options.__exit__(None, None, None)
            shutil.rmtree(self.folder, ignore_errors=True)


def run(checkpointer: Callable[..., Checkpointer], many: settings = MANY) -> Counter[str]:
    body = {"checkpointer": staticmethod(checkpointer), "counts": Counter()}
    machine = type("Machine", (Machine,), body)
    run_state_machine_as_test(machine, settings=many)
    return machine.counts


pytestmark = [
    pytest.mark.timeout(7200),
    # a damaged one, beside which another process saves
    pytest.mark.filterwarnings("ignore:.*holds later checkpoints than"),
]


def test_it_is_what_a_blocking_save_would_have_left() -> None:
    counts = run(Checkpointer)
    print(dict(counts))
    wanted = ["saves", "checked", "crashes", "crashes in time", *["all damaged"] * FULL]
    assert all(counts[name] for name in wanted), counts


# Of a control it is enough to know that it fails.
FIRST_FAILURE = settings(MANY, phases=[Phase.generate], report_multiple_bugs=False)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_broken_checkpointer_is_noticed(name: str) -> None:
    with pytest.raises((Wrong, Flaky)):  # a crash does not hit the same step twice
        run(CONTROLS[name], FIRST_FAILURE)


def test_saves_without_copies_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_copies(monkeypatch)
    with pytest.raises((Wrong, Flaky)):  # threads are not the same twice
        run(Checkpointer, FIRST_FAILURE)


def counted(out: str) -> dict[str, int]:
    return {name: int(count) for name, count in (word.split("=") for word in out.split())}


def test_two_ranks(tmp_path: Path) -> None:
    outs = ranks.run("ranks_model", 2, tmp_path, 1, 100 if FULL else 6, timeout=3600)
    found = [counted(out) for out in outs]
    assert found[0] == found[1]
    assert all(found[0][name] for name in ("saves", "checked")), found


def test_two_ranks_of_a_broken_checkpointer_are_noticed(tmp_path: Path) -> None:
    ended = ranks.Job("ranks_model", 2, tmp_path, 1, 20, "late").wait(240)
    assert all(end.code == 1 and "Wrong: step" in end.err for end in ended), ended
