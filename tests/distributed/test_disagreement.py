"""Ranks that make different calls, or hold different tensors: never one file of both."""

from __future__ import annotations

import os
import time
import weakref
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ranks

import fastserial
from fastserial import distributed
from fastserial.distributed.comm.store import BoundedStore

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("count", "calls"), [(2, 200 if FULL else 60), (3, 60 if FULL else 30)])
def test_a_file_is_of_one_call(count: int, calls: int, tmp_path: Path) -> None:
    """One rank skips, repeats or renames calls, or makes another one."""
    out = ranks.run("ranks_disagree", count, "calls", tmp_path, 100 * count, calls)
    worked, mixed = map(int, out[0].split())
    assert worked > calls // 3
    assert mixed == 0


def test_calls_that_are_not_compared_are_mixed(tmp_path: Path) -> None:
    """The control."""
    ended = ranks.Job("ranks_disagree", 2, "calls", tmp_path, 200, 12, "control").wait()
    assert any(len(one) > 1 for one in map(_steps, tmp_path.glob("*.pt"))), ended


def _steps(path: Path) -> set[int]:
    found = torch.load(path)
    return {found["step"], *found["shards"].unique().tolist()}


def test_a_step_that_one_rank_has(tmp_path: Path) -> None:
    ranks.run("ranks_disagree", 2, "steps", tmp_path)


def test_a_store_lives_no_longer_than_its_job() -> None:
    """Else the next process group of this process meets the old one's keys."""
    store = BoundedStore("x", dist.HashStore(), 5)  # type: ignore[attr-defined]
    ended = weakref.ref(store.inner)  # which keeps the job's
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    until = time.monotonic() + 5
    while ended() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert ended() is None


def test_who_waits_says_for_whom(tmp_path: Path) -> None:
    ranks.run("ranks_disagree", 2, "waits", tmp_path)


@pytest.mark.parametrize("call", ["save", "save_async", "load"])
def test_ranks_without_a_process_group(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program under torchrun that does not call `init_process_group`."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    path, state = tmp_path / "x.pt", {"x": torch.ones(3)}
    torch.save(state, path)
    before = path.read_bytes()
    arguments = (path, state) if call == "load" else ({"x": torch.zeros(3)}, path)
    with pytest.raises(fastserial.ConfigError, match=r"one of 4 processes.*init_process_group"):
        getattr(distributed, call)(*arguments)
    assert path.read_bytes() == before


def test_a_tensor_is_what_one_rank_had(tmp_path: Path) -> None:
    out = ranks.run("ranks_disagree", 4, "tensors", tmp_path, 3, 200 if FULL else 25)
    mixed, refused = map(int, out[0].split())
    assert mixed == 0
    assert refused < (100 if FULL else 12)


def test_states_of_which_one_rank_has_something_else(tmp_path: Path) -> None:
    """In one file, and in a folder of DCP."""
    out = ranks.run("ranks_disagree", 4, "states", tmp_path, 4, 300 if FULL else 20)
    mixed, refused = map(int, out[0].split())
    assert mixed == 0
    assert refused > (60 if FULL else 4)


def test_replicas_that_are_divided_unseen_are_mixed(tmp_path: Path) -> None:
    """The control: as if all bytes had been compared."""
    out = ranks.run("ranks_disagree", 4, "tensors", tmp_path, 3, 25, "control")
    assert int(out[0].split()[0]) > 0


def test_all_bytes_are_compared_if_asked_for(tmp_path: Path) -> None:
    ranks.run("ranks_disagree", 2, "compared", tmp_path)


@pytest.mark.parametrize("count", [2, 3])
def test_values_that_differ(count: int, tmp_path: Path) -> None:
    ranks.run("ranks_disagree", count, "values", tmp_path)


def test_storages_that_differ(tmp_path: Path) -> None:
    ranks.run("ranks_disagree", 2, "storages", tmp_path)


def test_shards_of_a_class_of_their_own(tmp_path: Path) -> None:
    ranks.run("ranks_disagree", 2, "subclasses", tmp_path)


@pytest.mark.parametrize("kind", ["Float8Tensor", "OptimState8bit"])
def test_shards_of_torchao(kind: str, tmp_path: Path) -> None:
    if find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    ranks.run("ranks_disagree", 2, "subclasses", tmp_path, kind)


@pytest.mark.parametrize("when", ["first", "second", "writing"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stopped_rank_is_named_in_time(victim: int, when: str, tmp_path: Path) -> None:
    """Also the one that hosts the job's store, which then answers nobody."""
    if not FULL and (victim, when) not in {(0, "first"), (0, "writing"), (1, "second")}:
        pytest.skip("the long form only")
    job = ranks.Job("ranks_stop", 3, tmp_path, victim, when)
    others = [rank for rank in range(3) if rank != victim]
    until = time.monotonic() + 100
    while not all(job.out(rank) for rank in others) and time.monotonic() < until:
        time.sleep(0.05)
    job.kill(victim)
    job.wait()
    for rank in others:
        blamed, seconds = job.out(rank).split()
        assert int(blamed) == victim
        assert float(seconds) < 3 + 5 + 10, "the timeout, five seconds, and a busy machine"
