"""`CheckpointCallback` and `resume_from`: what is complete, and what the Trainer removes."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.forms import FULL

from fastserial import verify

if importlib.util.find_spec("transformers") is None or not importlib.util.find_spec("accelerate"):
    pytest.skip(
        "transformers and accelerate are not installed: nox -s integrations",
        allow_module_level=True,
    )

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from fastserial.integrations.transformers import (
    MARK,
    CheckpointCallback,
    is_complete,
    resume_from,
)

pytestmark = pytest.mark.filterwarnings("default", "ignore:.*CheckpointCallback. did not mark")
SEARCH = importlib.util.find_spec("optuna") is not None


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


DATA: Any = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(64)]


class Killed(Exception):
    """Ends a training run where a kill would."""


@dataclass(frozen=True)
class Plan:
    """What one training run does.

    Attributes:
        steps, every: the number of steps, and of steps between saves.
        limit: `save_total_limit`.
        losses: of the evaluations, of which the best one's checkpoint is kept; none: no evaluation.
        kind: "train", "twice" (`train()` is called twice), or "search" (two trials).
        resume: whether it resumes from the newest complete checkpoint.
        killed: the step in which the run is killed; negative: in the save of that step.
        signal: the step before which SIGTERM arrives (`enable_jit_checkpoint`).
    """

    steps: int
    every: int = 1
    limit: int | None = None
    losses: tuple[int, ...] = ()
    kind: str = "train"
    resume: bool = False
    killed: int = 0
    signal: int = 0


class Killing(TrainerCallback):
    """Kills a run in a step; named `after`: after it wrote a checkpoint, before others know it."""

    def __init__(self, step: int, after: bool = False) -> None:
        self.step, self.after = step, after

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not self.after and state.global_step + 1 == self.step:
            raise Killed

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.after and state.global_step == self.step:
            raise Killed


class Scripted(Trainer):
    """A Trainer with known losses, which is killed where its plan says so."""

    plan: Plan

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        losses = self.plan.losses or (0,)
        found = {"eval_loss": float(losses[self.state.global_step % len(losses)])}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        if self.state.global_step + 1 == self.plan.signal:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, JITCheckpointCallback) and callback.jit_manager:
                    callback.jit_manager.is_checkpoint_requested = True
        return super().training_step(*arguments, **named)

    def _save_rng_state(self, *arguments: Any, **named: Any) -> None:
        if self.state.global_step == -self.plan.killed:
            raise Killed
        super()._save_rng_state(*arguments, **named)
        time.sleep(0.005)  # the clock of a file system has steps of 4 ms


def run(folder: Path, plan: Plan, *callbacks: TrainerCallback, resume: str | None = None) -> None:
    strategy: dict[str, Any] = {}
    if plan.losses:
        strategy = {
            "eval_strategy": "steps",
            "eval_steps": plan.every,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "greater_is_better": False,
        }
    args = TrainingArguments(
        str(folder),
        max_steps=plan.steps,
        save_steps=plan.every,
        save_total_limit=plan.limit,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        enable_jit_checkpoint=plan.signal > 0,
        **strategy,
    )
    trainer = Scripted(
        args=args,
        model_init=lambda trial=None: Net(),
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        callbacks=[*callbacks, Killing(plan.killed)],
    )
    trainer.plan = plan
    try:
        if plan.kind == "search":
            trainer.hyperparameter_search(
                lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1)},
                n_trials=2,
                backend="optuna",
                compute_objective=lambda metrics: 0.0,
            )
            return
        trainer.train(resume_from_checkpoint=resume)
        if plan.kind == "twice":
            trainer.train()
    except Killed:
        pass


def folders(parent: Path) -> list[str]:
    return sorted(str(one.relative_to(parent)) for one in parent.rglob("checkpoint-*"))


# -- what stays: what the Trainer alone keeps ------------------------------------------------------

PLANS = st.builds(
    Plan,
    steps=st.integers(1, 6),
    every=st.integers(1, 2),
    limit=st.sampled_from([None, 0, 1, 2, 3]),
    losses=st.one_of(st.just(()), st.lists(st.integers(0, 9), min_size=3, max_size=7).map(tuple)),
    kind=st.sampled_from(["train", "train", "twice", *(["search"] if SEARCH else [])]),
    resume=st.booleans(),
    killed=st.one_of(st.just(0), st.integers(-6, 6)),
    signal=st.sampled_from([0, 0, 0, 2, 3]),
)


@pytest.mark.slow
@settings(
    max_examples=300 if FULL else 6,
    derandomize=not FULL,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(plans=st.lists(PLANS, min_size=1, max_size=3), by_time=st.booleans())
def test_the_trainer_alone_keeps_the_same(plans: list[Plan], by_time: bool) -> None:
    """It removes by time, but by step if the times of all folders are within a second."""
    real: Callable[[str], float] = os.path.getmtime
    factor = 1000 if by_time else 0
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os.path, "getmtime", lambda path: real(path) * factor)
        stock, ours = Path(root, "stock"), Path(root, "ours")
        for plan in plans:
            newest = resume_from(ours) if plan.resume and plan.kind != "search" else None
            same = newest and str(stock / Path(newest).name)
            run(stock, plan, resume=same)
            run(ours, plan, CheckpointCallback(), resume=newest)
            assert folders(ours) == folders(stock)
        if all(plan.killed >= 0 for plan in plans):
            assert all(is_complete(ours / one) for one in folders(ours))


def test_two_runs_into_one_folder(tmp_path: Path) -> None:
    """The second is longer: it meets folders of the first, and removes some of them."""
    for steps in (4, 6):
        run(tmp_path, Plan(steps, limit=2), CheckpointCallback())
    assert folders(tmp_path) == ["checkpoint-5", "checkpoint-6"]


def test_nothing_is_removed_before_the_new_one_is_durable(tmp_path: Path) -> None:
    run(tmp_path, Plan(2, limit=2), CheckpointCallback())
    before = ["checkpoint-1", "checkpoint-2"]
    assert folders(tmp_path) == before
    callbacks = Killing(3, after=True), CheckpointCallback()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastserial.integrations.transformers._sync", failing)
        with pytest.raises(OSError, match="no such luck"):
            run(tmp_path, Plan(3, limit=1), CheckpointCallback(), resume=str(tmp_path / before[1]))
    assert folders(tmp_path) == [*before, "checkpoint-3"]
    assert not is_complete(tmp_path / "checkpoint-3")
    run(tmp_path, Plan(3, limit=1), *callbacks, resume=str(tmp_path / before[1]))
    assert folders(tmp_path) == [*before, "checkpoint-3"]
    # the Trainer alone has removed them by then
    run(tmp_path, Plan(3, limit=1), callbacks[0], resume=str(tmp_path / before[1]))
    assert folders(tmp_path) == ["checkpoint-3"]


def failing(folder: Path) -> None:
    raise OSError("no such luck")


def test_the_arguments_stay_as_they_are(tmp_path: Path) -> None:
    """`training_args.bin` too."""
    run(tmp_path, Plan(1, limit=2), CheckpointCallback())
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == 2


def test_a_trainer_without_the_callback_is_not_changed(tmp_path: Path) -> None:
    run(tmp_path / "ours", Plan(3, limit=1), CheckpointCallback())
    run(tmp_path / "stock", Plan(3, limit=1))
    assert folders(tmp_path) == ["ours/checkpoint-3", "stock/checkpoint-3"]
    assert not (tmp_path / "stock" / "checkpoint-3" / MARK).exists()


# -- what is complete ------------------------------------------------------------------------------


def test_the_newest_complete_one(tmp_path: Path) -> None:
    assert resume_from(tmp_path) is None
    assert resume_from(tmp_path / "nowhere") is None
    run(tmp_path, Plan(4, every=2), CheckpointCallback())
    four = str(tmp_path / "checkpoint-4")
    assert resume_from(tmp_path) == four
    run(tmp_path, Plan(8, every=2, killed=-6), CheckpointCallback(), resume=four)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-6: not complete; checkpoint-4"):
        assert resume_from(tmp_path) == four


@pytest.mark.parametrize("harm", ["shorter", "no mark", "sentinel"])
def test_what_is_not_complete(tmp_path: Path, harm: str) -> None:
    run(tmp_path, Plan(1), CheckpointCallback())
    found = tmp_path / "checkpoint-1"
    assert is_complete(found)
    if harm == "sentinel":
        (found / "checkpoint-is-incomplete.txt").touch()
    else:
        os.truncate(found / "optimizer.pt", 100)
        if harm == "no mark":
            (found / MARK).unlink()
    assert not is_complete(found)
    with pytest.warns(RuntimeWarning, match="training starts from the beginning"):
        assert resume_from(tmp_path) is None


@pytest.mark.parametrize("marked", [True, False])
def test_a_checkpoint_that_a_killed_run_began_to_write_anew(tmp_path: Path, marked: bool) -> None:
    """Some of its files are the old ones and some are new: all of them whole."""
    run(tmp_path, Plan(2, every=2), *([CheckpointCallback()] if marked else []))
    folder = tmp_path / "checkpoint-2"
    assert is_complete(folder) == marked
    run(tmp_path, Plan(2, every=2, killed=2), CheckpointCallback())  # before it writes there
    assert is_complete(folder) == marked
    run(tmp_path, Plan(2, every=2, killed=-2), CheckpointCallback())
    assert not is_complete(folder)
    assert verify(folder / MARK).status == "damaged"
    with pytest.warns(
        RuntimeWarning, match="checkpoint-2: not complete; training starts from the beginning"
    ):
        assert resume_from(tmp_path) is None
    run(tmp_path, Plan(2, every=2), CheckpointCallback())
    assert is_complete(folder)


def test_a_signal(tmp_path: Path) -> None:
    """`JITCheckpointCallback` saves without a call of `on_save`."""
    run(tmp_path, Plan(6, every=4, limit=1, signal=3), CheckpointCallback())
    assert folders(tmp_path) == ["checkpoint-2"]
    assert is_complete(tmp_path / "checkpoint-2")


def test_the_callback_is_adopted_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """The Trainer's newest whole checkpoint is offered."""
    run(tmp_path, Plan(4))
    two = str(tmp_path / "checkpoint-2")
    os.truncate(tmp_path / "checkpoint-3" / "optimizer.pt", 500)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()  # killed before its end
    with pytest.warns(RuntimeWarning) as caught:
        assert resume_from(tmp_path) == two
    said = [str(one.message) for one in caught]
    assert "checkpoint-4, checkpoint-3: not complete; checkpoint-2 is used" in said[0]
    assert "checkpoint-2: it is used although `CheckpointCallback` did not mark it" in said[1]
    run(tmp_path, Plan(3), CheckpointCallback(), resume=two)
    with pytest.warns(RuntimeWarning, match="checkpoint-4: not complete; checkpoint-3 is used"):
        assert resume_from(tmp_path) == str(tmp_path / "checkpoint-3")
