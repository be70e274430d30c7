"""A save before the first step changes nothing, and training goes on from it bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
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
    distributed.save_async(run.state, first, snapshot="in_place").wait()
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


def test_the_file_has_what_the_state_dict_has(tmp_path: Path) -> None:
    run = Run("adam")
    distributed.save(run.state, tmp_path / "ours.pt")
    state = run.optimizer.state_dict()
    assert not state["state"]
    names = [name for name, _ in run.model.named_parameters()]
    state["param_groups"][0]["params"] = names
    whole = {"model": run.model.state_dict(), "optimizer": state, "at": 0}
    torch.save(whole, tmp_path / "stock.pt")
    found, stock = torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "stock.pt")
    assert found["optimizer"] == stock["optimizer"]
    (tmp_path / "given").mkdir()
    distributed.save({**run.state, "optimizer": state}, tmp_path / "given" / "ours.pt")
    given = torch.load(tmp_path / "given" / "ours.pt")
    assert given["optimizer"] == stock["optimizer"]


def test_what_could_not_take_a_step(tmp_path: Path) -> None:
    """On a CPU, `capturable` does not step; torch's own state of it cannot be had."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    state = {"model": model, "optimizer": optimizer}
    distributed.save(state, tmp_path / "state.pt")
    distributed.load(tmp_path / "state.pt", state)
    assert not optimizer.state


def test_gradients_do_not_matter(tmp_path: Path) -> None:
    run = Run("adam")
    run.steps(2)
    distributed.save(run.state, tmp_path / "state.pt")
    expected = run.steps(4)
    again = Run("adam")
    again.model(torch.ones(2, 8)).sum().backward()
    distributed.load(tmp_path / "state.pt", again.state)
    assert again.steps(4) == expected


def test_a_stepped_one_goes_back(tmp_path: Path) -> None:
    run = Run("adam")
    distributed.save(run.state, tmp_path / "state.pt")
    expected = run.steps(3)
    distributed.load(tmp_path / "state.pt", run.state)
    assert run.state["at"] == 0
    assert not run.optimizer.state
    assert run.steps(3) == expected


def test_a_load_that_fails_leaves_it_new(tmp_path: Path) -> None:
    run = Run("adam")
    run.steps(1)
    distributed.save(run.state, tmp_path / "state.pt")
    again = Run("adam")
    more: dict[str, Any] = {**again.state, "more": 1}
    with pytest.raises(fastserial.LoadMismatchError, match="more"):
        distributed.load(tmp_path / "state.pt", more)
    assert not again.optimizer.state
    assert again.steps(3) == Run("adam").steps(3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_capturable_on_a_gpu(tmp_path: Path) -> None:
    def made() -> tuple[dict[str, Any], Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), capturable=True)
        return {"model": model, "optimizer": optimizer}, optimizer

    def train(state: dict[str, Any]) -> list[float]:
        losses = []
        for step in range(3):
            state["optimizer"].zero_grad()
            loss = state["model"](torch.full((2, 8), step + 1.0, device="cuda")).square().mean()
            loss.backward()
            state["optimizer"].step()
            losses.append(loss.item())
        return losses

    expected = train(made()[0])
    state, _ = made()
    distributed.save(state, tmp_path / "state.pt")
    assert train(state) == expected
    again, _ = made()
    distributed.load(tmp_path / "state.pt", again)
    assert train(again) == expected


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks(tmp_path: Path, kind: str) -> None:
    if kind == "fsdp" and torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 has no FSDP2 on CPUs")
    names = ("adam foreach", "sgd") if kind == "ddp" else ("adam fused", "rows")
    assert ranks.run("ranks_unstepped", 2, tmp_path, kind, *names) == ["same\n"] * 2
