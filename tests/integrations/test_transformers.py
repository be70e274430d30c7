"""`CheckpointCallback` and `resume_from`: what counts as complete, and what may go."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastserial import verify

pytest.importorskip("transformers", reason="transformers is not installed: nox -s integrations")

from fastserial.integrations.transformers import (
    MARK,
    CheckpointCallback,
    is_complete,
    resume_from,
)

pytestmark = pytest.mark.filterwarnings("default")


class Training:
    """What the Trainer tells a callback."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.args: Any = SimpleNamespace(
            output_dir=str(folder), save_total_limit=limit, local_process_index=0
        )
        self.state: Any = SimpleNamespace(
            global_step=0, is_world_process_zero=True, best_model_checkpoint=None
        )
        self.callback = CheckpointCallback()
        self.tell("on_train_begin")

    def tell(self, event: str) -> None:
        getattr(self.callback, event)(self.args, self.state, SimpleNamespace())

    def write(self, step: int, text: str = "x") -> Path:
        self.state.global_step = step
        self.tell("on_step_end")
        found = self.folder / f"checkpoint-{step}"
        found.mkdir(exist_ok=True)
        (found / "model.safetensors").write_text(text)
        (found / "trainer_state.json").write_text("{}")
        return found

    def save(self, step: int) -> Path:
        found = self.write(step)
        self.tell("on_save")
        return found


def test_the_newest_complete_one(tmp_path: Path) -> None:
    training = Training(tmp_path)
    assert resume_from(tmp_path) is None
    assert resume_from(tmp_path / "nowhere") is None
    training.save(5)
    ten = training.save(10)
    assert resume_from(tmp_path) == str(ten)
    training.write(20)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-20: not complete; checkpoint-10"):
        assert resume_from(tmp_path) == str(ten)


@pytest.mark.parametrize("harm", ["shorter", "no mark", "sentinel"])
def test_what_is_not_complete(tmp_path: Path, harm: str) -> None:
    found = Training(tmp_path).save(10)
    assert is_complete(found)
    if harm == "shorter":
        (found / "model.safetensors").write_text("")
    elif harm == "no mark":
        (found / MARK).unlink()
    else:
        (found / "checkpoint-is-incomplete.txt").touch()
    assert not is_complete(found)
    with pytest.warns(RuntimeWarning, match="training starts from the beginning"):
        assert resume_from(tmp_path) is None


def test_old_ones_go_after_the_mark(tmp_path: Path) -> None:
    training = Training(tmp_path, limit=1)
    assert training.args.save_total_limit is None  # the Trainer removes nothing meanwhile
    training.save(5)
    training.write(10)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-5"]
    training.tell("on_save")
    assert os.listdir(tmp_path) == ["checkpoint-10"]
    training.state.best_model_checkpoint = str(tmp_path / "checkpoint-10")
    training.save(15)
    training.save(20)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-20"]
    training.tell("on_train_end")
    assert training.args.save_total_limit == 1


def test_a_checkpoint_that_is_written_anew_is_not_complete_meanwhile(tmp_path: Path) -> None:
    """A run is resumed from step 5; at step 10 it overwrites what an earlier run had marked."""
    Training(tmp_path).save(10)
    training = Training(tmp_path)
    assert is_complete(tmp_path / "checkpoint-10")
    training.write(10)  # and killed
    assert not is_complete(tmp_path / "checkpoint-10")
    training.tell("on_save")
    assert is_complete(tmp_path / "checkpoint-10")
    training.tell("on_step_end")
    assert is_complete(tmp_path / "checkpoint-10")


def stocks(folder: Path, step: int) -> Path:
    """Make what the Trainer leaves without the callback."""
    found = folder / f"checkpoint-{step}"
    found.mkdir(parents=True)
    torch.save({"w": torch.ones(3000)}, found / "optimizer.pt")
    (found / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return found


def test_the_callback_is_adopted_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """Stock's newest whole checkpoint is offered, and none of its is ever removed."""
    stocks(tmp_path, 10)
    twenty = stocks(tmp_path, 20)
    os.truncate(stocks(tmp_path, 30) / "optimizer.pt", 5000)
    (stocks(tmp_path, 40) / "trainer_state.json").unlink()  # killed before its end
    with pytest.warns(RuntimeWarning) as caught:
        assert resume_from(tmp_path) == str(twenty)
    said = [str(one.message) for one in caught]
    assert "checkpoint-40, checkpoint-30: not complete; checkpoint-20 is used" in said[0]
    assert "checkpoint-20: it is used although `CheckpointCallback` did not mark it" in said[1]
    before = set(os.listdir(tmp_path))
    training = Training(tmp_path, limit=1)
    for step in (21, 22):
        training.save(step)
    assert set(os.listdir(tmp_path)) == before | {"checkpoint-22"}


@pytest.mark.parametrize("marked", [True, False])
def test_a_checkpoint_that_a_killed_run_began_to_write_anew(tmp_path: Path, marked: bool) -> None:
    """Some of its files are the old ones and some are new: all of them whole."""
    folder = stocks(tmp_path, 10)
    if marked:
        Training(tmp_path).save(10)
        (folder / "trainer_state.json").write_text('{"global_step": 10}')
    training = Training(tmp_path)
    training.state.global_step = 10
    training.tell("on_step_end")
    torch.save({"w": torch.zeros(3000)}, folder / "optimizer.pt")  # and killed
    assert not is_complete(folder)
    assert verify(folder / MARK).status == "damaged"
    with pytest.warns(
        RuntimeWarning, match="checkpoint-10: not complete; training starts from the beginning"
    ):
        assert resume_from(tmp_path) is None
