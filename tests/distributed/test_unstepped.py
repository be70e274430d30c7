"""A save before the first step changes nothing, and training goes on from it bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import ranks
from support.own_loading import Lookahead
from support.unstepped import OPTIMIZERS, Run

import fastserial
from fastserial import distributed


@pytest.mark.parametrize("name", [*OPTIMIZERS, "lbfgs"])
def test_a_process_alone(tmp_path: Path, name: str) -> None:
    expected = Run(name).steps(4)
    run = Run(name)
    hooks: list[object] = []
    run.optimizer.register_step_post_hook(lambda *given: hooks.append(given))
    versions = [parameter._version for parameter in run.model.parameters()]
    first, later = tmp_path / "first.pt", tmp_path / "later.pt"
    distributed.save(run.state, first)
    distributed.save_async(run.state, first).wait()
    assert not hooks
    assert versions == [parameter._version for parameter in run.model.parameters()]
    assert all(parameter.grad is None for parameter in run.model.parameters())
    done = run.steps(2)
    distributed.save(run.state, later)
    assert done + run.steps(4) == expected
    for path in (first, later):
        again = Run(name)
        distributed.load(path, again.state)
        at = again.state["at"]
        copy = tmp_path / "again" / path.name
        copy.parent.mkdir(exist_ok=True)
        distributed.save(again.state, copy)
        assert copy.read_bytes() == path.read_bytes()
        assert again.steps(4) == expected[at:]


def test_a_stepped_one_goes_back(tmp_path: Path) -> None:
    run = Run("adam")
    distributed.save(run.state, tmp_path / "state.pt")
    expected = run.steps(3)
    distributed.load(tmp_path / "state.pt", run.state)
    assert run.state["at"] == 0
    assert not run.optimizer.state
    assert run.steps(3) == expected


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks(tmp_path: Path, kind: str) -> None:
    if kind == "fsdp" and torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 has no FSDP2 on CPUs")
    names = ("adam foreach", "sgd") if kind == "ddp" else ("adam fused", "rows", "asking")
    ranks.run("ranks_train", 2, "unstepped", tmp_path, kind, *names)


def test_a_state_without_names_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": Lookahead(model.parameters())}
    with pytest.raises(fastserial.ConfigError, match=r"Lookahead.* has a form of its own"):
        distributed.save(state, tmp_path / "state.pt")
