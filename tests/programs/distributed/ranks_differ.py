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

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed.optim import ZeroRedundancyOptimizer

import fastserial
from fastserial import Checkpointer, distributed
from fastserial.distributed import FastSavePlanner, FastStorageWriter
from fastserial.errors import DistributedError

LARGE = 2**19 + 123  # more than 1 MiB of float32


def refused(call: Callable[[], object], *words: str) -> None:
    """Make sure that a call fails on this rank, and that the error has the words."""
    try:
        call()
    except DistributedError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no error of {words}")


def keeps(path: Path, state: dict[str, Any], *words: str, **options: Any) -> None:
    """Make sure that a state is refused, and that the old file stays. Collective."""
    before = path.read_bytes()
    dist.barrier()
    refused(lambda: distributed.save(state, path, timeout=30, **options), *words)
    dist.barrier()
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def plain_tensors(path: Path, rank: int) -> None:
    """They are compared in the first save, and in those that go by its plan."""
    state = {"w": torch.ones(LARGE), "b": torch.zeros(3)}
    distributed.save(state, path, timeout=30)
    told = ("'w'", "rank 0 and rank 2", "FlatShard", "broadcast")
    for change in (lambda: state["w"].fill_(rank // 2), lambda: state.update(more=torch.ones(2))):
        change()
        keeps(path, state, *told)
    state["w"].fill_(1)
    distributed.save(state, path, timeout=30)
    columns = torch.ones(700, 1000).t()
    columns[:, 10:] = float(rank)
    keeps(path, {"columns": columns}, "'columns'", "rank 0 and ranks 1, 2")


def all_bytes(path: Path, rank: int) -> None:
    """One element, which no sample meets, differs."""
    for tensor in (torch.zeros(LARGE), torch.zeros(1000, 700).t()):
        tensor[(5,) * (tensor.dim() - 1) + (601,)] = float(rank == 1)
        distributed.save({"w": tensor}, path, timeout=30)
        with fastserial.options(compare="all"):
            keeps(path, {"w": tensor}, "'w'", "rank 0 and rank 1")
            distributed.save({"w": torch.ones_like(tensor)}, path, timeout=30)
    with fastserial.options(compare="all" if rank == 1 else "sampled"):
        keeps(path, {"w": torch.ones(LARGE)}, 'rank 1: its option compare is "all"')


def stages(path: Path, rank: int) -> None:
    """With merge="union" those that have a tensor are compared."""
    state = {f"of {rank // 2}": torch.full((LARGE,), float(rank // 2)), "n": {rank: rank}}
    distributed.save(state, path, timeout=30, merge="union")
    found = torch.load(path)
    assert found["n"] == {0: 0, 1: 1, 2: 2}
    assert found["of 0"].unique().tolist() == [0]
    assert found["of 1"].unique().tolist() == [1]
    state = {f"of {rank // 2}": torch.full((LARGE,), float(rank))}
    keeps(path, state, "'of 0'", "rank 0 and rank 1", merge="union")


def small_ones(path: Path, rank: int) -> None:
    """The file has rank 0's, and rank 0 says so once."""
    for number in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            distributed.save({"a": torch.full((9,), float(rank)), "n": rank}, path, timeout=30)
        texts = [str(one.message) for one in caught]
        assert len(texts) == (rank == 0 and number == 0), texts
        assert all("'a'" in text and "ranks 1, 2" in text for text in texts), texts
    found = torch.load(path)
    assert found["n"] == 0
    assert not found["a"].any()


def buffers(path: Path, rank: int) -> None:
    """Those of modules are rank 0's, of whatever size, as DDP has it."""
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("large", torch.full((LARGE,), float(rank)))
    module.running_mean.fill_(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed.save({"model": module}, path, timeout=30)
        distributed.save({"model": module}, path, timeout=30)
    found = torch.load(path)["model"]
    assert not found["large"].any()
    assert not found["running_mean"].any()
    keeps(path, {"model": module.state_dict()}, "'model.large'", "rank 0 and ranks 1, 2")


def keys(path: Path, rank: int) -> None:
    """The file has those of rank 0: no other rank may have more."""
    state: dict[str, Any] = {"w": torch.ones(3), "n": {"step": 1}, "seen": Counter({rank: 2})}
    state["best"] = {"loss": 1.0} if rank else None  # values may differ, as may what is no name
    state["many"] = dict.fromkeys(range(5000 - 2000 * rank), rank)
    state["leaves"] = {"w": torch.ones(3)}
    if rank == 0:
        state["arguments"] = {"lr": 1.0}  # nothing is lost
    for _ in range(2):
        distributed.save(state, path, timeout=30)
    assert torch.load(path)["arguments"] == {"lr": 1.0}
    more: Any
    nested: Any = {"w": torch.ones(3), "mine": 5}
    for more in ({"mine": 5}, {"n": {"step": 1, "mine": 5}}, {"mine": {}}, {"leaves": nested}):
        keeps(
            path, {**state, **(more if rank == 2 else {})}, "rank 2: ", "mine'", "all_gather_object"
        )


def odd_tensors(path: Path, rank: int) -> None:
    """What `load` could not fill."""
    odd = {
        "torch.sparse_coo": torch.eye(4).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
    }
    for word, tensor in odd.items():
        for options in ({}, {"merge": "union"}):
            keeps(path, {"x": {"odd": tensor}}, word, **options)


def objects(path: Path, rank: int) -> None:
    """Those with a state that is neither a module's nor an optimizer's."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": module, "optimizer": optimizer, "more": [{"scheduler": scheduler}]}
    words = ("more.0.scheduler is a StepLR", "state_dict()")
    keeps(path, state, *words)
    refused(lambda: distributed.load(path, state, timeout=30), *words)
    state["more"] = scheduler.state_dict()
    distributed.save(state, path, timeout=30)
    assert torch.load(path)["more"] == scheduler.state_dict()
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    keeps(path, {"model": module, "optimizer": zero}, "ZeroRedundancyOptimizer", "fully_shard")


def checkpoints(folder: Path, rank: int) -> None:
    """`Checkpointer` says so in `check`, and in `save`."""
    module = torch.nn.Linear(2, 2)
    module.register_buffer("odd", torch.eye(4).to_sparse())
    cases: list[tuple[dict[str, Any], str]] = [
        ({f"loader_{rank}": {"at": 3}}, "loader_1"),
        ({"model": module}, "model.odd"),
        ({"w": torch.full((LARGE,), float(rank))}, "'w'"),
    ]
    for state, word in cases:
        with Checkpointer(folder, state, timeout=30) as checkpointer:
            refused(checkpointer.check, word)
            refused(lambda: checkpointer.save(1), word)
            assert checkpointer.resume() == 0


def planners(folder: Path, rank: int) -> None:
    """`FastSavePlanner` saves the first rank's tensor as a whole, and says so."""
    warned = []
    for step in (0, 1, 2):
        state = {f"same.{number}": torch.full((LARGE,), float(step)) for number in range(2)}
        if step:
            state["same.0"] += rank
        for number in range(3):
            state[f"large.{number}"] = torch.full((LARGE + 9,), float(rank + step))
        path = folder / str(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer = FastStorageWriter(path)
            dcp.save({**state, "n": 3}, storage_writer=writer, planner=FastSavePlanner())
        texts = [str(one.message) for one in caught]
        warned.append([text for text in texts if "plain tensors of" in text])
        blank = {key: torch.zeros_like(one) for key, one in state.items()}
        dcp.load(blank, checkpoint_id=path)
        assert {float(value) for one in blank.values() for value in one.unique()} == {step}
    # Step 1 has one more that differs. Python's default filter shows the text of step 2 no more.
    assert [len(texts) for texts in warned] == ([1, 1, 1] if rank == 0 else [0, 0, 0]), warned
    assert warned[1] == warned[2]
    if rank == 0:
        assert "ranks 1, 2" in warned[0][0]
        assert "'large.0', 'large.1', 'large.2'" in warned[0][0]


def main() -> None:
    rank, _ = join()
    folder = Path(sys.argv[1])
    path = folder / "out" / "file.pt"
    if rank == 0:
        path.parent.mkdir()
    dist.barrier()
    cases = (plain_tensors, all_bytes, stages, small_ones, buffers, keys, odd_tensors, objects)
    for case in cases:
        distributed.save({"old": torch.ones(3)}, path, timeout=30)
        case(path, rank)
        dist.barrier()
        print(case.__name__, flush=True)
    checkpoints(folder / "checkpoints", rank)
    planners(folder, rank)


main()
