"""Parts of a checkpoint, under other names, and what each rank has for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.lives import Loader
from torch import nn

import fastserial
from fastserial import Checkpointer, LoadMismatchError


def model(number: float, *names: str) -> nn.Module:
    made = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    for one in made.parameters():
        nn.init.constant_(one, number)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of step 5."""
    state = {"model": model(1, "body", "head"), "epoch": 3, "average": torch.ones(2)}
    with Checkpointer(tmp_path, state) as checkpointer:
        checkpointer.save(5)
    return tmp_path


def test_only(folder: Path) -> None:
    state = {"model": model(0, "body", "head"), "epoch": 0, "average": torch.zeros(2), "new": 1}
    torch.manual_seed(1)
    expected = torch.get_rng_state()
    with Checkpointer(folder, state) as checkpointer:
        with pytest.raises(LoadMismatchError, match="no state of new"):
            checkpointer.resume()
        assert checkpointer.resume(only=["model", "epoch"]) == 5
        report = checkpointer.resumed
        assert report is not None
        assert (report.step, report.path) == (5, str(folder / "step-00000005.pt"))
        with pytest.raises(fastserial.ConfigError, match="nothing"):
            checkpointer.resume(only=["nothing"])
        with pytest.raises(fastserial.ConfigError, match="list of names"):
            checkpointer.resume(only="model")
    assert all(one.eq(1).all() for one in state["model"].parameters())
    assert (state["epoch"], state["new"], state["average"].tolist()) == (3, 1, [0, 0])
    assert torch.equal(torch.get_rng_state(), expected)


def test_not_strict(folder: Path) -> None:
    """Also where keys of a module are missing and left over."""
    state = {"model": model(0, "body", "tail"), "new": 1}
    with Checkpointer(folder, state) as checkpointer:
        with pytest.raises(LoadMismatchError):
            checkpointer.resume()
        assert checkpointer.resume(strict=False) == 5
        report = checkpointer.resumed
    assert report is not None
    assert report.missing == ("model.tail.weight", "new")
    assert report.unused == ("average", "epoch", "model.head.weight")
    body, tail = state["model"].parameters()
    assert body.eq(1).all()
    assert tail.eq(0).all()


def test_rename(folder: Path) -> None:
    state = {"net": model(0, "core", "head"), "at": 0, "average": torch.zeros(2)}
    rename = {"model.body": "net.core", "model": "net", "epoch": "at"}
    with Checkpointer(folder, state) as checkpointer:
        assert checkpointer.resume(rename=rename) == 5
        report = checkpointer.resumed
    assert report is not None
    assert (report.missing, report.unused) == ((), ())
    assert all(one.eq(1).all() for one in state["net"].parameters())
    assert (state["at"], state["average"].tolist()) == (3, [1, 1])


def test_per_rank_of_one_process(tmp_path: Path) -> None:
    first, second = Loader(7), Loader(2)
    order = first.order.tolist()
    with Checkpointer(tmp_path, {"x": 1}, per_rank={"loader": first, "n": 4}) as checkpointer:
        checkpointer.save(1)
        first.epoch = 8
    mine: dict[str, Any] = {"loader": second, "n": 0}
    with Checkpointer(tmp_path, {"x": 0}, per_rank=mine) as checkpointer:
        assert checkpointer.resume() == 1
    assert (second.epoch, second.order.tolist(), mine["n"]) == (7, order, 4)
    with Checkpointer(tmp_path, {"x": 0}, per_rank={"other": Loader(0)}) as checkpointer:
        with pytest.raises(LoadMismatchError, match="no other for this rank"):
            checkpointer.resume()
        assert checkpointer.resume(strict=False) == 1
        report = checkpointer.resumed
    assert report is not None
    assert report.missing == ("other",)
    for wrong in ({"x": 1}, {"rng": 1}, {"checkpointer": 1}, 3):
        with pytest.raises(fastserial.ConfigError):
            Checkpointer(tmp_path, {"x": 0}, per_rank=wrong)  # type: ignore[arg-type]


class Nested(dict):  # type: ignore[type-arg]
    """What torch knows by name only, and does not fill."""


def test_a_dictionary_that_torch_cannot_fill_is_warned_of(tmp_path: Path) -> None:
    with (
        torch.serialization.safe_globals([Nested]),
        Checkpointer(tmp_path, {"nest": Nested(a=1)}) as checkpointer,
        pytest.warns(UserWarning, match=r"nest: .*Nested"),
    ):
        checkpointer.save(1)


def test_many_ranks(tmp_path: Path) -> None:
    """See the program: each rank has its own loader, and the parts and names are the same."""
    found = [json.loads(out) for out in ranks.run("ranks_partial", 2, tmp_path, "first")]
    for rank, one in enumerate(found):
        assert one["loader"] == [10 + rank, 100 + rank * 5000]
        assert one["missing"] == ["model.tail.weight", "new"]
        assert one["parts"] == [1, 0]
        assert one["renamed"] == [1, 1, 3]
    assert found[0]["unused"] == ["epoch", "loose", "model.head.weight"]
    with Checkpointer(tmp_path, {"loose": torch.zeros(3)}) as checkpointer:
        checkpointer.resume(only=["loose"])  # without a warning: no generators are restored
    (alone,) = (json.loads(out) for out in ranks.run("ranks_partial", 1, tmp_path, "again"))
    assert alone == {"missing": ["loader"], "loader": 0}
