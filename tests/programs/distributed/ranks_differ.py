"""A rank of three: saves what differs between ranks. Argument: folder.

What one file cannot hold is an error on all ranks, and the old file stays.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import each, join
from torch.distributed.optim import ZeroRedundancyOptimizer

import fastserial
from fastserial import Checkpointer, distributed
from fastserial.distributed import FastSavePlanner, FastStorageWriter
from fastserial.errors import DistributedError

LARGE = 2**19 + 123  # more than 1 MiB of float32
FOLDER = Path(sys.argv[1])
PATH = FOLDER / "out" / "file.pt"
RANK, _ = join()


def save(state: Any, **options: Any) -> Any:
    """Save, and return what is in the file. Collective."""
    distributed.save(state, PATH, timeout=30, **options)
    dist.barrier()
    return torch.load(PATH)


def refused(call: Callable[[], object], *words: str) -> None:
    """Make sure that a call fails on this rank, and that the error has the words."""
    with pytest.raises(DistributedError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def keeps(state: dict[str, Any], *words: str, **options: Any) -> None:
    """Make sure that a state is refused, and that the old file stays. Collective."""
    before = PATH.read_bytes()
    dist.barrier()
    refused(lambda: save(state, **options), *words)
    dist.barrier()
    assert PATH.read_bytes() == before
    assert [one.name for one in PATH.parent.iterdir()] == [PATH.name]


def plain_tensors() -> None:
    """They are compared in the first save, and in those that go by its plan."""
    state = {"w": torch.ones(LARGE), "b": torch.zeros(3)}
    save(state)
    told = ("'w'", "rank 0 and rank 2", "FlatShard", "broadcast")
    for change in (lambda: state["w"].fill_(RANK // 2), lambda: state.update(more=torch.ones(2))):
        change()
        keeps(state, *told)
    state["w"].fill_(1)
    save(state)
    columns = torch.ones(700, 1000).t()
    columns[:, 10:] = float(RANK)
    keeps({"columns": columns}, "'columns'", "rank 0 and ranks 1, 2")


def all_bytes() -> None:
    """One element, which no sample meets, differs."""
    for tensor in (torch.zeros(LARGE), torch.zeros(1000, 700).t()):
        tensor[(5,) * (tensor.dim() - 1) + (601,)] = float(RANK == 1)
        save({"w": tensor})
        with fastserial.options(compare="all"):
            keeps({"w": tensor}, "'w'", "rank 0 and rank 1")
            save({"w": torch.ones_like(tensor)})
    with fastserial.options(compare="all" if RANK == 1 else "sampled"):
        keeps({"w": torch.ones(LARGE)}, 'rank 1: its option compare is "all"')


def stages() -> None:
    """With merge="union" those that have a tensor are compared."""
    state = {f"of {RANK // 2}": torch.full((LARGE,), float(RANK // 2)), "n": {RANK: RANK}}
    found = save(state, merge="union")
    assert found["n"] == {0: 0, 1: 1, 2: 2}
    assert [found[f"of {stage}"].unique().tolist() for stage in (0, 1)] == [[0], [1]]
    state = {f"of {RANK // 2}": torch.full((LARGE,), float(RANK))}
    keeps(state, "'of 0'", "rank 0 and rank 1", merge="union")


def small_ones() -> None:
    """The file has rank 0's, and rank 0 says so once, of the line that saves."""
    for number in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = save({"a": torch.full((9,), float(RANK)), "n": RANK})
        texts = [str(one.message) for one in caught]
        assert len(texts) == (RANK == 0 and number == 0), texts
        assert all("'a'" in text and "ranks 1, 2" in text for text in texts), texts
        assert all(one.filename == __file__ for one in caught), caught
    assert found["n"] == 0
    assert not found["a"].any()
    state = {"c": torch.full((9,), float(RANK))}
    with Checkpointer(FOLDER / "small", {"d": state["c"]}, timeout=30) as checkpointer:
        for call in (
            lambda: distributed.save_async(state, PATH, timeout=30).wait(),
            lambda: checkpointer.save(1),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            assert [one.filename for one in caught] == [__file__] * (RANK == 0), caught
            first = call.__code__.co_firstlineno
            assert all(one.lineno == first for one in caught), (caught, first)


def buffers() -> None:
    """Those of modules are rank 0's, of whatever size, as DDP has it."""
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("large", torch.full((LARGE,), float(RANK)))
    module.running_mean.fill_(RANK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            found = save({"model": module})["model"]
    assert not found["large"].any()
    assert not found["running_mean"].any()
    keeps({"model": module.state_dict()}, "'model.large'", "rank 0 and ranks 1, 2")


def keys() -> None:
    """The file has those of rank 0: no other rank may have more."""
    state: dict[str, Any] = {"w": torch.ones(3), "n": {"step": 1}, "seen": Counter({RANK: 2})}
    state["best"] = {"loss": 1.0} if RANK else None  # values may differ, as may what is no name
    state["many"] = dict.fromkeys(range(5000 - 2000 * RANK), RANK)
    state["leaves"] = {"w": torch.ones(3)}
    if RANK == 0:
        state["arguments"] = {"lr": 1.0}  # nothing is lost
    for _ in range(2):
        assert save(state)["arguments"] == {"lr": 1.0}
    nested: Any = {"w": torch.ones(3), "mine": 5}
    some: Any = ({"mine": 5}, {"n": {"step": 1, "mine": 5}}, {"mine": {}}, {"leaves": nested})
    for more in some:
        mine = {**state, **more} if RANK == 2 else state
        keeps(mine, "rank 2: ", "mine'", "all_gather_object")


def odd_tensors_and_objects() -> None:
    """What `load` could not fill; what has a state, but is neither a module nor an optimizer."""
    odd = {
        "torch.sparse_coo": torch.eye(4).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
    }
    for word, tensor in odd.items():
        for options in ({}, {"merge": "union"}):
            keeps({"x": {"odd": tensor}}, word, **options)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": module, "optimizer": optimizer, "more": [{"scheduler": scheduler}]}
    words = ("more.0.scheduler is a StepLR", "state_dict()")
    keeps(state, *words)
    refused(lambda: distributed.load(PATH, state, timeout=30), *words)
    state["more"] = scheduler.state_dict()
    assert save(state)["more"] == scheduler.state_dict()
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    keeps({"model": module, "optimizer": zero}, "ZeroRedundancyOptimizer", "fully_shard")


def checkpoints() -> None:
    """`Checkpointer` says so in `save`."""
    module = torch.nn.Linear(2, 2)
    module.register_buffer("odd", torch.eye(4).to_sparse())
    cases: list[tuple[dict[str, Any], str]] = [
        ({f"loader_{RANK}": {"at": 3}}, "loader_1"),
        ({"model": module}, "model.odd"),
        ({"w": torch.full((LARGE,), float(RANK))}, "'w'"),
    ]
    for state, word in cases:
        with Checkpointer(FOLDER / "checkpoints", state, timeout=30) as checkpointer:
            refused(lambda: checkpointer.save(1), word)
            assert checkpointer.resume() == 0


def planners() -> None:
    """`FastSavePlanner` saves the first rank's tensor as a whole, and says so."""
    path = FOLDER / "dcp"
    state = {"same": torch.ones(LARGE), "large": torch.full((LARGE + 9,), float(RANK)), "n": 3}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.save(state, storage_writer=FastStorageWriter(path), planner=FastSavePlanner())
    texts = [str(one.message) for one in caught if "plain tensors of" in str(one.message)]
    assert len(texts) == (RANK == 0), texts
    assert all("ranks 1, 2" in text and "'large'" in text for text in texts), texts
    found = {"same": torch.zeros(LARGE), "large": torch.full((LARGE + 9,), 7.0)}
    dcp.load(found, checkpoint_id=path)
    assert found["same"].unique().tolist() == [1]
    assert found["large"].unique().tolist() == [0]


def main() -> None:
    PATH.parent.mkdir(exist_ok=True)
    cases = (
        *(plain_tensors, all_bytes, stages, small_ones, buffers, keys, odd_tensors_and_objects),
        *(checkpoints, planners),
    )
    save({"old": torch.ones(3)})
    each(cases)


main()
