"""Checkpointer: saves, prunes, resumes."""

from __future__ import annotations

import os
import random
import signal
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.damage import damage, flip
from support.lives import Loader, Objects, Spec, canonical, names, stock
from torch import nn

import fastserial
from fastserial import Checkpointer

SPEC = Spec("adam", "multi", (("average", ""),), "", False, False, False, None, False, 150)


@pytest.mark.parametrize("seed", range(4))
def test_it_goes_on_bit_for_bit(tmp_path: Path, seed: int) -> None:
    """The random generators of torch, Python and NumPy do, too."""

    def trained(objects: Objects) -> Any:
        for _ in range(4):
            objects.train()
            objects.forward()
        return canonical(stock(objects.state)), random.random(), np.random.rand()

    spec = Spec.of(random.Random(seed))
    first = Objects(spec, 1, 0)
    with Checkpointer(tmp_path, first.state) as checkpointer:
        assert checkpointer.resume() == 0
        for step in range(1, 4):
            first.train()
            checkpointer.save(step)
    expected = trained(first)
    second = Objects(spec, 2, 0)
    with Checkpointer(tmp_path, second.state) as checkpointer:
        assert checkpointer.resume() == 3
        assert trained(second) == expected
    assert names(tmp_path) == [f"step-0000000{n}.pt" for n in (1, 2, 3)]


def test_it_is_an_ordinary_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path, {"model": model}, rng=False) as checkpointer:
        checkpointer.save(7)
    found = torch.load(tmp_path / "step-00000007.pt")
    assert found["checkpointer"] == {"version": 1, "step": 7}
    assert found["model"].keys() == model.state_dict().keys()


def test_keep_and_every(tmp_path: Path) -> None:
    others = {"step-1.pt", "step-00000001.pt.bak", "other.pt", "step-00000002.pth"}
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "step-00000000.pt").mkdir()
    with Checkpointer(tmp_path, {"x": 1}, keep=2, every=10) as checkpointer:
        made = [step for step in range(1, 61) if checkpointer.save(step) is not None]
        assert made == [10, 20, 30, 40, 50, 60]
    assert set(names(tmp_path)) == others | {
        "step-00000000.pt",
        "step-00000050.pt",
        "step-00000060.pt",
    }


@pytest.mark.parametrize("how", ["bit", "half", "empty", "noise"])
def test_a_damaged_newest_one_is_passed_over(tmp_path: Path, how: str) -> None:
    state = {"x": torch.zeros(40_000)}
    with Checkpointer(tmp_path, state, keep=2) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step)
    newest = tmp_path / "step-00000020.pt"
    if how == "bit":
        flip(newest, newest.stat().st_size // 2)
    else:
        damage(newest, how, random.Random(1))
    with Checkpointer(tmp_path, state, keep=1) as checkpointer:
        with pytest.warns(RuntimeWarning, match=r"step-00000020\.pt is (damaged|no checkpoint)"):
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


def test_resume_at_a_step(tmp_path: Path) -> None:
    state = {"n": 0}
    with Checkpointer(tmp_path, state) as checkpointer:
        for step in (1, 2, 3):
            state["n"] = step
            checkpointer.save(step)
    with Checkpointer(tmp_path, state) as checkpointer:
        with pytest.warns(UserWarning, match="later checkpoints"):
            assert checkpointer.resume(step=2) == 2
        assert state["n"] == 2
        with pytest.raises(FileNotFoundError):
            checkpointer.resume(step=9)


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
            assert not checkpointer.asked  # there is no checkpoint yet
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


def test_leftovers_of_killed_saves_go(tmp_path: Path) -> None:
    left = tmp_path / ".step-00000004.pt.fastserial-0.tmp"
    left.write_bytes(b"half")
    other = tmp_path / ".other.pt.fastserial-0.tmp"
    other.write_bytes(b"half")
    with Checkpointer(tmp_path, {"x": 1}) as checkpointer:
        checkpointer.resume()
    assert names(tmp_path) == [other.name]


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


def test_containers_of_other_objects_are_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"nets": [nn.Linear(2, 2), nn.Linear(2, 2)]}) as checkpointer:
        checkpointer.save(1)
    with (
        Checkpointer(tmp_path, {"nets": [nn.Linear(2, 2)]}) as checkpointer,
        pytest.raises(fastserial.LoadMismatchError, match=r"step-00000001\.pt: nets .*: 1"),
    ):
        checkpointer.resume()


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


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_state_dict_is_refused(tmp_path: Path, name: str) -> None:
    state = Objects(SPEC, 1, 0).state
    with pytest.raises(fastserial.ConfigError, match=f"x\\['{name}'\\].*pass the object"):
        Checkpointer(tmp_path, {"x": {name: state[name].state_dict()}})
    average = dict(state["model"].state_dict())
    Checkpointer(tmp_path, {"average": average}).close()


def test_an_expanded_tensor_is_refused(tmp_path: Path) -> None:
    x = torch.ones(1, 4).expand(3, 4)
    with pytest.raises(fastserial.ConfigError, match=r"x\['a'\].*expanded.*clone"):
        Checkpointer(tmp_path, {"x": {"a": x}})
    Checkpointer(tmp_path, {"x": {"a": x.clone(), "one": torch.ones(1).expand(1)}}).close()


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("keep", 0), ("keep", None), ("every", 0), ("every", "10"), ("snapshot_budget", -1)],
        *[("snapshot_budget", "1GB"), ("keep_every", 0), ("keep_best", "loss")],
        *[("keep_best", ("loss", "least")), ("keep_for", "soon")],
    ],
)
def test_wrong_arguments(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(fastserial.ConfigError, match=f"^{name} must be "):
        Checkpointer(tmp_path, {}, **{name: value})


def test_wrong_states(tmp_path: Path) -> None:
    with pytest.raises(fastserial.ConfigError, match=r'\{"model": model, .*, not Linear'):
        Checkpointer(tmp_path, nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(fastserial.ConfigError, match="checkpointer"):
        Checkpointer(tmp_path, {"checkpointer": 1})
