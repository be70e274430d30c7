"""Checkpointer: saves, prunes, resumes."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.damage import flip
from support.lives import Loader, names
from torch import nn

import fastserial
from fastserial import Checkpointer


def test_a_damaged_newest_one_is_passed_over(tmp_path: Path) -> None:
    state = {"x": torch.zeros(40_000)}
    with Checkpointer(tmp_path, state, keep=2) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step)
    newest = tmp_path / "step-00000020.pt"
    flip(newest, newest.stat().st_size // 2)
    with Checkpointer(tmp_path, state, keep=1) as checkpointer:
        with pytest.warns(RuntimeWarning, match=r"step-00000020\.pt is damaged"):
            assert checkpointer.resume() == 10
        assert checkpointer.latest() == str(tmp_path / "step-00000010.pt")
        checkpointer.save(11)
        checkpointer.wait()
        assert names(tmp_path) == ["step-00000011.pt", "step-00000020.pt"]
        checkpointer.save(20)
        checkpointer.wait()
        assert names(tmp_path) == ["step-00000020.pt"]
        assert checkpointer.latest() == str(newest)


def test_a_file_of_another_program_is_no_damage(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"n": 1}) as checkpointer:
        checkpointer.save(1)
    torch.save({"n": 2}, tmp_path / "step-00000002.pt")
    with Checkpointer(tmp_path, {"n": 0}) as checkpointer:
        with pytest.warns(RuntimeWarning, match="2.pt is no checkpoint of a Checkpointer; the"):
            assert checkpointer.resume() == 1
        (tmp_path / "step-00000001.pt").unlink()
        with (
            pytest.warns(RuntimeWarning, match="is no checkpoint"),
            pytest.raises(fastserial.UnreadableCheckpointError, match="damaged, or is none"),
        ):
            checkpointer.resume()


class Custom:
    pass


def test_what_weights_only_refuses_is_no_damage(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"x": Custom()}) as checkpointer:
        with pytest.warns(UserWarning, match="resume"):
            checkpointer.save(1)
        with pytest.raises(Exception, match="weights_only"):
            checkpointer.resume()
    with Checkpointer(tmp_path, {"x": Custom()}, weights_only=False) as checkpointer:
        assert checkpointer.resume() == 1


def test_handlers_of_before_are_called_and_come_back(tmp_path: Path) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    try:
        with Checkpointer(tmp_path, {"x": 1}, every=100) as checkpointer:
            checkpointer.save_on(signal.SIGUSR1, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not checkpointer.stop_requested  # there is no checkpoint yet
            saving = checkpointer.save(2)
            assert saving is not None
            assert saving.done()
        assert called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(called) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert names(tmp_path) == ["step-00000002.pt"]


def test_an_error_shows_at_the_next_save(tmp_path: Path) -> None:
    def fail(threads: int) -> Any:
        raise OSError(5, "no engine")

    state = {"x": torch.ones(5000)}
    checkpointer = Checkpointer(tmp_path, state)
    with fastserial.options(engine=fail, small_file=0):
        checkpointer.save(1)
    with pytest.raises(fastserial.WriteError):
        checkpointer.save(2)
    checkpointer.save(3)
    checkpointer.close()
    assert names(tmp_path) == ["step-00000003.pt"]


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_a_step_is_a_whole_number_of_any_type(tmp_path: Path, kind: Callable[[int], Any]) -> None:
    with Checkpointer(tmp_path, {"x": 1}) as checkpointer:
        checkpointer.save(kind(3))
        checkpointer.wait()
        assert checkpointer.resume() == 3
        with pytest.raises(fastserial.ConfigError, match="negative"):
            checkpointer.save(-3)
        with pytest.raises(TypeError):
            checkpointer.save(3.0)  # type: ignore[arg-type]
    assert names(tmp_path) == ["step-00000003.pt"]


def test_what_does_not_fit_in_a_container_is_replaced(tmp_path: Path) -> None:
    saved = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8), "c": 1}
    with Checkpointer(tmp_path, {"x": saved}) as checkpointer:
        checkpointer.save(1)
    state: dict[str, Any] = {"x": {"b": torch.zeros(2), "a": torch.zeros(4), "d": 5}}
    with Checkpointer(tmp_path, state) as checkpointer:
        checkpointer.resume()
    assert list(state["x"]) == ["a", "b", "c"]
    assert state["x"]["b"].dtype == torch.int8
    assert torch.equal(state["x"]["a"], torch.ones(3))


@pytest.mark.parametrize(
    "error", [FileNotFoundError("shard"), fastserial.CorruptCheckpointError("shard"), KeyError("x")]
)
def test_errors_of_the_users_own_code_go_through(tmp_path: Path, error: Exception) -> None:
    loader = Loader(1)
    with Checkpointer(tmp_path, {"loader": loader}) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
        checkpointer.wait()
        with (
            mock.patch.object(Loader, "load_state_dict", side_effect=error),
            pytest.raises(type(error)) as raised,
        ):
            checkpointer.resume()
    assert raised.value is error


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        (nn.Linear(2, 2), nn.Linear(3, 3), "size mismatch for weight"),
        (torch.optim.SGD([torch.ones(2)]), torch.optim.SGD([*map(torch.ones, (2, 3))]), "group"),
        (1, torch.ones(2), "int in the file"),
        (1, nn.Linear(2, 2), "type int"),
        (torch.ones(3), torch.ones(2), r"shape \(3,\)"),
        ([nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], ": 1"),
    ],
)
def test_another_object_is_named(tmp_path: Path, saved: Any, here: Any, text: str) -> None:
    with Checkpointer(tmp_path, {"entry": saved}) as checkpointer:
        checkpointer.save(1)
    with (
        Checkpointer(tmp_path, {"entry": here}) as checkpointer,
        pytest.raises(
            fastserial.LoadMismatchError, match=rf"step-00000001\.pt: entry (?s:.*){text}"
        ),
    ):
        checkpointer.resume()


def test_the_first_save_warns_of_what_weights_only_refuses(tmp_path: Path) -> None:
    state = {
        "best": np.float64(1),
        "nest": {"queue": deque([1])},
        "optimizer": torch.optim.SGD([torch.ones(2)], lr=np.float32(1)),
        "sizes": [torch.Size([1]), torch.float16, {1, 2}, OrderedDict(a=1)],
    }
    with Checkpointer(tmp_path, state) as checkpointer:
        with pytest.warns(UserWarning, match="add_safe_globals") as caught:
            checkpointer.save(1)
        checkpointer.save(2)
    text = str(caught[0].message)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for name in ("best: ", "nest: ", "collections.deque", "optimizer: "):
        assert name in text
    assert "sizes" not in text


def test_compiled_modules_make_the_same_file(tmp_path: Path) -> None:
    files = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model = nn.Sequential(torch.compile(model, backend="eager") if compiled else model, model)
        whole = torch.compile(model, backend="eager") if compiled else model
        folder = tmp_path / str(compiled)
        with Checkpointer(folder, {"model": whole}, rng=False) as checkpointer:
            checkpointer.save(1)
            checkpointer.wait()
            with torch.no_grad():
                model[1][0].weight.zero_()
            checkpointer.resume()
            assert model[1][0].weight.any()
        files.append((folder / "step-00000001.pt").read_bytes())
    assert files[0] == files[1]
    found = torch.load(folder / "step-00000001.pt")  # an ordinary file
    assert found["checkpointer"] == {"version": 1, "step": 1}
    names = [key.replace("_orig_mod.", "") for key in model.state_dict()]
    assert list(found["model"]) == names


REFUSED = {
    "a model": (nn.Linear(1, 1), r'\{"model": model, .*, not Linear'),
    "our name": ({"checkpointer": 1}, "checkpointer"),
    "a state of a model": (
        {"x": {"model": nn.Linear(1, 1).state_dict()}},
        r"x\['model'\].*pass the object",
    ),
    "a state of an optimizer": (
        {"x": {"optimizer": torch.optim.Adam([torch.ones(2)]).state_dict()}},
        r"x\['optimizer'\].*pass the object",
    ),
    "expanded": ({"x": {"a": torch.ones(1, 4).expand(3, 4)}}, r"x\['a'\].*expanded.*clone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_states_that_are_refused(tmp_path: Path, name: str) -> None:
    state, text = REFUSED[name]
    with pytest.raises(fastserial.ConfigError, match=text):
        Checkpointer(tmp_path, state)  # type: ignore[arg-type]


def test_states_that_are_like_those(tmp_path: Path) -> None:
    average = dict(nn.Linear(1, 1).state_dict())
    Checkpointer(tmp_path, {"average": average, "one": torch.ones(1).expand(1)}).close()


def test_wrong_arguments(tmp_path: Path) -> None:
    for name, *values in (
        ("keep", 0, None),
        ("every", 0, "10"),
        ("snapshot_budget", -1, "1GB"),
        ("keep_every", 0),
        ("keep_best", "loss", ("loss", "least")),
        ("keep_for", "soon"),
    ):
        for value in values:
            with pytest.raises(fastserial.ConfigError, match=f"^{name} must be "):
                Checkpointer(tmp_path, {}, **{name: value})
