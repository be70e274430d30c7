"""Messages of ranks along the tree: the package's own, among threads instead of processes."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.simulated_ranks import Network

from fastserial.distributed.comm import group
from fastserial.distributed.comm.call import RankCall
from fastserial.distributed.comm.group import RankGroup
from fastserial.distributed.comm.rendezvous import GRACE
from fastserial.distributed.comm.tree import neighbours
from fastserial.errors import DistributedError, MismatchedCallError

TIMEOUT = 1.5


@pytest.mark.parametrize("size", [1, 2, 3, 31, 32, 33, 512, 1024, 16_384])
def test_neighbours(size: int) -> None:
    """Every rank has one above it, and few below; what is below it are consecutive ranks."""
    around = [neighbours(rank, size) for rank in range(size)]
    for rank, one in enumerate(around):
        assert all(around[child].parent == rank for child in one.children)
        assert (one.parent is None) == (rank == 0)
        assert len(one.children) <= (30 if size < 32 else 16)
    depth = Counter[int]()
    for rank in range(1, size):
        above = around[rank].parent
        assert above is not None
        depth[rank] = depth[above] + 1
    assert max(depth.values(), default=0) <= {16_384: 4, 1024: 3, 512: 3, 33: 2, 32: 2}.get(size, 1)
    if size <= 1024:
        assert list(_in_order(around, 0)) == list(range(size))


def _in_order(around: list[Any], rank: int) -> Any:
    yield rank
    for child in around[rank].children:
        yield from _in_order(around, child)


@pytest.mark.parametrize("size", [1, 2, 5, 31, 40])
def test_values_come_in_the_order_of_the_ranks(size: int) -> None:
    def work(comm: RankGroup) -> Any:
        comm.match_calls()
        every = comm.decide_on_root(comm.rank, list)
        most = comm.reduce_on_root(comm.rank, max, lambda largest: largest)
        comm.barrier()
        return every, most

    found = Network(size).run(work, 20)
    assert [result for result, _ in found] == [(list(range(size)), size - 1)] * size


class Late(Network):
    """Rank 0 comes to its first call after a while."""

    def comm(self, rank: int, *more: Any, **named: Any) -> RankGroup:
        if rank == 0:
            time.sleep(1)
        return super().comm(rank, *more, **named)


def test_a_rank_0_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others say meanwhile for whom they wait."""
    monkeypatch.setattr(group, "_PATIENCE", 0.2)
    found = Late(3).run(lambda comm: comm.decide_on_root(comm.rank, len), 5)
    assert [result for result, _ in found] == [3, 3, 3]


@pytest.mark.parametrize("slow", [0, 3, 39])
def test_a_slow_rank_is_waited_for(slow: int) -> None:
    """Far longer than the timeout, wherever it is in the tree, while it shows that it is alive."""

    def work(comm: RankGroup) -> Any:
        comm.match_calls()
        if comm.rank == slow:
            until = time.monotonic() + 3 * TIMEOUT
            while time.monotonic() < until:
                comm.heartbeat()
                time.sleep(0.02)
        return comm.decide_on_root(comm.rank, len)

    assert [result for result, _ in Network(40).run(work, TIMEOUT)] == [40] * 40


@pytest.mark.parametrize("how", ["killed", "silent", "raises"])
@pytest.mark.parametrize("victim", [0, 1, 3, 39])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_rank_that_fails_is_named_on_all(how: str, victim: int, step: int) -> None:
    """Rank 3 has ranks above and below it, rank 39 is in the tree's last row."""
    if (victim + step) % 3 and how != "silent":
        pytest.skip("others have this place in the tree, or this step")
    network = Network(40)
    assert neighbours(3, 40).children
    steps = itertools.count

    def work(comm: RankGroup) -> Any:
        at = steps()
        for call in (comm.match_calls, comm.barrier, comm.barrier):
            if comm.rank == victim and next(at) == step:
                if how == "raises":
                    raise ValueError("mine")
                if how == "killed":
                    network.kill(victim)
                network.ended.wait(60)
            call()
        return None

    found = network.run(work, TIMEOUT, but=-1 if how == "raises" else victim)
    for rank, (result, seconds) in enumerate(found):
        if rank != victim:
            assert isinstance(result, DistributedError), (rank, result)
            assert result.rank == victim, (rank, result)
            assert seconds < TIMEOUT + 5, (rank, seconds)


@pytest.mark.parametrize("waits_for", ["words", "data"])
def test_who_is_late_is_not_taken_for_who_is_silent(
    waits_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is late, rank 2 silent: the others wait for rank 1 first, and have to name rank 2."""
    monkeypatch.setattr(group, "GRACE", 0.1)
    network = Network(4)

    def work(comm: RankGroup) -> None:
        comm.match_calls()
        if comm.rank == 2:
            network.ended.wait(60)
        if comm.rank == 1:
            time.sleep(TIMEOUT / 2)
        if waits_for == "words":
            comm.barrier()
        else:
            comm.receive((comm.rank + 1) % 4, torch.zeros(8))()

    found = network.run(work, TIMEOUT, but=2)
    for rank in (0, 1, 3):
        assert getattr(found[rank][0], "rank", None) == 2, (rank, found[rank])


def _make_calls(comm: RankGroup, names: list[str]) -> list[tuple[str, Any]]:
    """Make calls, in each of which the ranks tell each other its name; return what came of each."""
    outcomes: list[tuple[str, Any]] = []
    for name in names:
        call = RankCall("save", name, name)
        try:
            with comm.held_for(call):
                comm.begin(20, call)
                with comm.propagate_errors():
                    comm.match_calls()
                    outcomes.append(
                        (name, comm.decide_on_root(name, lambda each: sorted(set(each))))
                    )
        except MismatchedCallError as error:
            outcomes.append((name, error))
    return outcomes


@pytest.mark.parametrize("size", [2, 3, 5, 40])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_skip_and_repeat_calls(size: int, seed: int) -> None:
    """No call joins two; those who do not match hear it, and calls that all make work again."""
    plans: list[list[str]] = []
    for rank in range(size):
        chance, plan = random.Random(f"{seed} {rank}"), list[str]()
        for step in range(12):
            plan += [f"step {step}"] * chance.choices([1, 0, 2], [95, 3, 2])[0]
        plans.append([*plan, "one", "two", "three"])
    threads, network = ThreadPoolExecutor(size), Network(size)
    work = [
        threads.submit(_make_calls, network.comm(rank), plan) for rank, plan in enumerate(plans)
    ]
    for rank, outcomes in enumerate([one.result(60) for one in work]):
        assert [name for name, _ in outcomes] == plans[rank]
        assert outcomes[-1] == ("three", ["three"])
        for name, outcome in outcomes:
            assert outcome == [name] or isinstance(outcome, MismatchedCallError), outcome


def test_a_store_that_was_slow_once_ends_no_later_call() -> None:
    network = Network(3)
    slow = [True]

    class SlowStore:
        """It answers late while a failure is published."""

        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            def answer(*given: Any) -> Any:
                if slow:
                    slow.clear()
                    time.sleep(GRACE + 0.5)
                return getattr(self.store, name)(*given)

            return answer

    def calls(comm: RankGroup) -> list[str]:
        assert _make_calls(comm, ["first"]) == [("first", ["first"])]
        with pytest.raises((DistributedError, ValueError)), comm.held_for(RankCall("fails")):
            comm.begin(6, RankCall("fails"))
            with comm.propagate_errors():
                comm.match_calls()
                if comm.rank == 1:
                    here = comm._rendezvous._here()
                    here.inner = SlowStore(here.inner)
                if comm.rank == 0:
                    raise ValueError("mine")
                comm.barrier()
        return _make_calls(comm, ["next"])[0][1]

    with ThreadPoolExecutor(3) as threads:
        traffics = [network.comm(rank) for rank in range(3)]
        assert list(threads.map(calls, traffics, timeout=60)) == [["next"]] * 3
    assert not slow


def test_what_an_earlier_group_left_is_not_read(tmp_path: Path) -> None:
    """Neither its last error nor its addresses."""
    if not hasattr(dist.ProcessGroupGloo, "create_default_device") or "lazy_init" not in str(
        dist.ProcessGroupGloo.create_default_device.__doc__
    ):
        pytest.skip("gloo itself cannot be made anew over one store")
    ranks.run("ranks_control", 2, "anew", tmp_path)


def test_a_save_in_the_middle_of_a_save_is_refused(tmp_path: Path) -> None:
    ranks.run("ranks_control", 2, "handler", tmp_path)


def test_a_save_in_the_middle_of_what_save_async_writes_at_once_is_refused(tmp_path: Path) -> None:
    ranks.run("ranks_control", 2, "writing_handler", tmp_path)


def test_a_save_in_the_middle_of_a_save_would_break_both(tmp_path: Path) -> None:
    """The control."""
    ranks.run("ranks_control", 2, "handler", tmp_path, "control")


def test_errors_name_the_ranks_of_the_job(tmp_path: Path) -> None:
    ranks.run("ranks_control", 3, "some", tmp_path)
