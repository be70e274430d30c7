"""A rank of three: calls that fail on some rank, each for another reason.

Arguments: folder, and `all`, `unseen` or `differ` (what is not the same on all ranks).

Nobody waits for a timeout: the rank raises the error itself, the others one that names the rank.
The old file stays, nothing else is left, and the next save goes well.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.limits import file_size_limit
from support.ranks import each, join
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import fastserial
from fastserial import Checkpointer, ConfigError, DistributedError, WriteError, distributed
from fastserial.distributed import FastSavePlanner, FastStorageWriter, FlatShard
from fastserial.distributed.comm.call import RankCall
from fastserial.distributed.comm.group import rank_group_of
from fastserial.distributed.save import shared_file
from fastserial.engines.threads import ThreadsEngine
from fastserial.saving import incremental

FOLDER = Path(sys.argv[1])
PATH = FOLDER / "out" / "file.pt"
RANK, COUNT = join()
MESH = DeviceMesh("cpu", torch.arange(COUNT))
MIB = 2**20
_CLONE_NEWNS = 0x20000

State = dict[str, Any]
Kind = type[BaseException] | tuple[type[BaseException], ...]


def refused(
    call: Callable[[], object], rank: int | None, text: str = "", kind: Kind = DistributedError
) -> BaseException:
    """Make sure that all ranks raise, and return the error.

    Args:
        rank: whose fault it is; None: everyone's.
        kind: what that rank raises.
    """
    began = time.monotonic()
    with pytest.raises(BaseException, match=text) as caught:
        call()
    error = caught.value
    assert time.monotonic() - began < 60, f"it took its time: {error!r}"
    assert isinstance(error, kind if rank == RANK else DistributedError), error
    if isinstance(error, DistributedError):
        assert rank in (None, error.rank), error
    dist.barrier()
    return error


def good() -> State:
    return {
        "step": 7,
        "rows": distribute_tensor(torch.arange(MIB).view(1024, 1024), MESH, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(MIB).view(1024, 1024), MESH, [Shard(1)]),
    }


def save(state: State | None = None) -> None:
    distributed.save(good() if state is None else state, PATH, timeout=30)


# -- states that one file cannot hold --------------------------------------------------------------


class Ragged(Placement):
    """Only its own class knows which rows a rank has."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ragged)

    def __hash__(self) -> int:
        return hash(Ragged)


def placed(local: torch.Tensor, placement: Any, *shape: int) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    size = torch.Size(shape)
    return DTensor.from_local(local, MESH, [placement], run_check=False, shape=size, stride=strides)


def ragged() -> DTensor:
    made = distribute_tensor(torch.zeros(3), MESH, [Shard(0)])
    made._spec.placements = (Ragged(),)
    return made


def resized(state: State) -> None:
    state["rows"].to_local().untyped_storage().resize_(100)


def halved(state: State) -> None:
    """What `module.half()` does to the memory of its parameters."""
    state["flat"].tensor.data = state["flat"].tensor.data.half()


def flat(dtype: torch.dtype, nbytes: int) -> FlatShard:
    count = nbytes // dtype.itemsize
    return FlatShard((3 * MIB,), dtype, RANK * MIB, count, torch.zeros(count, dtype=dtype))


# What is saved besides, what is done on the rank whose fault it is, that rank, the error's text.
WRONG: list[tuple[Callable[[], State], Callable[[State], object], int | None, str]] = [
    (dict, lambda state: state.update(more=torch.zeros(3)), 1, "'more'"),
    (
        lambda: {"bias": torch.zeros(3)},
        lambda state: state.update(bias=torch.zeros(4)),
        2,
        r"'bias' is torch.float32 of shape \(4,\)",
    ),
    (
        dict,
        lambda state: state.update(
            rows=placed(torch.zeros(1024, 340, dtype=torch.int64), Shard(1), 1024, 1024)
        ),
        2,
        "its 'rows' is placed otherwise",
    ),
    (dict, resized, 1, "rows: its shard needs [0-9]+ bytes, .* resized to 100"),
    (
        lambda: {"flat": flat(torch.float32, 4 * MIB)},
        halved,
        2,
        "flat: the tensor is torch.float16, the FlatShard torch.float32",
    ),
    (lambda: {"gap": flat(torch.uint8, 5)}, id, None, "gap: no rank has elements 5 to 1048575"),
    (
        lambda: {"sum": placed(torch.zeros(3), Partial(), 3)},
        id,
        None,
        "sum: it is .*a sum that no rank has",
    ),
    (lambda: {"x": ragged()}, id, None, "x: its placement .*Ragged.*FlatShard"),
]


def states() -> None:
    for more, break_it, rank, text in WRONG:
        state = {**good(), **more()}
        if rank in (None, RANK):
            break_it(state)
        refused(lambda: save(state), rank, text)  # noqa: B023
    state = good()
    if RANK == 0:
        state["hook"] = lambda: None
    refused(lambda: save(state), 0, "ickl", (PicklingError, AttributeError))


# -- what happens in a save ------------------------------------------------------------------------


def full_disk() -> None:
    for rank in (0, 1):  # in its plan, and in its writes
        limit = MIB if rank == RANK else resource.RLIM_INFINITY
        with file_size_limit(limit):
            error = refused(save, rank, "file of this size|File too large")
        assert isinstance(error, WriteError)
        assert error.errno == errno.EFBIG
        assert error.filename == str(PATH), error.filename


class Interrupted(ThreadsEngine):
    """As if Ctrl-C came in the middle of the writes."""

    name = "interrupted"

    def submit(self, requests: Any) -> None:
        raise KeyboardInterrupt("KeyboardInterrupt")


def interrupted() -> None:
    with fastserial.options(engine=Interrupted if RANK == 2 else "threads"):
        refused(save, 2, "KeyboardInterrupt", KeyboardInterrupt)


def silent() -> None:
    """A rank that comes too late: the others raise after the timeout, and name it."""
    state = good()
    if RANK == 1:
        time.sleep(4)
    began = time.monotonic()
    with pytest.raises(DistributedError, match="not heard from") as caught:
        distributed.save(state, PATH, timeout=1)
    assert caught.value.rank == 1
    assert time.monotonic() - began < 3.9


def late() -> None:
    """Rank 1 fails, and 0 comes when that is over, for whom 2 waits over older connections."""
    state: Any = good()
    save(state)
    if RANK == 0:
        time.sleep(1)
    if RANK == 1:
        state = torch.optim.SGD([torch.ones(3, requires_grad=True)])  # of a parameter without name
    with pytest.raises((DistributedError, ValueError)):
        save(state)


def broken_off() -> None:
    """Rank 0 fails in the middle of a message, of which gloo does not tell the other one."""
    group: Any = dist.new_group([0, 1])
    if RANK == 2:
        return
    comm = rank_group_of(group)
    comm.begin(60, RankCall("a test"))
    began = time.monotonic()
    with (
        pytest.raises((OSError, DistributedError), match="the disk broke"),
        comm.propagate_errors(),
    ):
        data = torch.full((512 * MIB,), 7 * (1 - RANK), dtype=torch.uint8)
        if RANK == 0:
            comm.receive(1, data[:1])()  # the other one is there
            comm.send(1, data)  # no buffer of the system takes as much
            time.sleep(0.01)  # it has begun
            raise OSError("the disk broke")
        comm.send(0, data[:1])()
        comm.receive(0, data)()
        comm.receive(0, data)()
    assert time.monotonic() - began < comm.timeout / 2


def unseen() -> None:
    """Rank 2 sees another file system in the folder."""
    state = good()
    if RANK == 2:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", PATH.parent], check=True)
    refused(lambda: save(state), 2, "one file system")
    if RANK == 2:
        subprocess.run(["umount", PATH.parent], check=True)


def uncloned() -> None:
    """Where nothing is cloned space is reserved; the report names a rank that could not clone."""

    def clone(fd: int, base: int, offset: int, nbytes: int) -> None:
        if RANK in failing:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.pwrite(fd, os.pread(base, nbytes, offset), offset)

    for failing in ((), (1,), (0, 1, 2)):
        reserved: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(incremental, "clone_range", clone)
            patch.setattr(shared_file, "reserve", lambda *args: reserved.append(args[2]))  # noqa: B023
            report = distributed.save(good(), PATH, timeout=30, base=PATH)
        assert ("can be cloned" in str(report.fallback)) == bool(failing), report
        if RANK == 0:
            assert (report.cloned > 0) == (len(failing) < 3), report
            assert reserved == [report.bytes] * (len(failing) == 3), reserved
        dist.barrier()


# -- before the ranks have exchanged anything ------------------------------------------------------


def arguments() -> None:
    """Also again and again: connections are closed while others are still being made."""
    wrong: Any = RANK == 1
    merge, budget = ("unoin", -1) if wrong else (None, None)
    nowhere: Any = None if wrong else PATH
    state = {"n": 1}
    call: Callable[[], object] = lambda: distributed.save(state, PATH, merge=merge)  # noqa: E731
    refused(call, 1, "unoin", ValueError)
    call = lambda: distributed.save_async(state, PATH, snapshot_budget=budget)  # noqa: E731
    refused(call, 1, "at least 0", ConfigError)
    for _ in range(20):
        refused(lambda: distributed.save(state, nowhere), 1, "NoneType", TypeError)
    refused(lambda: distributed.load(nowhere, state), 1, "NoneType", TypeError)
    swapped: Any = distributed.save
    with pytest.raises(TypeError, match="swapped"):
        swapped(str(PATH), state)


class Module(nn.Linear):
    """What a user writes: its methods may fail on one rank."""

    error: BaseException | None = None

    def get_extra_state(self) -> str:
        if RANK == 1 and self.error is not None:
            raise self.error
        return "extra"

    def set_extra_state(self, state: str) -> None:
        self.get_extra_state()


def code_of_the_user() -> None:
    module = Module(2, 2)
    path = FOLDER / "module.pt"
    distributed.save({"m": module}, path)
    with Checkpointer(FOLDER / "steps", {"m": module}) as checkpoints:
        checkpoints.save(1)
        checkpoints.wait()
        calls: list[Callable[[], object]] = [
            lambda: distributed.save({"m": module}, path),
            lambda: distributed.save_async({"m": module}, path),
            lambda: distributed.load(path, {"m": module}),
            lambda: checkpoints.save(2),
            checkpoints.resume,
        ]
        for error in (KeyError("mine"), FileNotFoundError("mine"), KeyboardInterrupt("mine")):
            module.error = error
            for call in calls:
                refused(call, 1, "mine", (type(error), DistributedError))
        module.error = None
        distributed.load(path, {"m": module})
        checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.resume() == 2


def outside_the_group() -> None:
    group = dist.new_group([0, 2])
    if RANK == 1:
        with pytest.raises(ConfigError, match="rank 1 of the job is not in `group`"):
            distributed.save({"n": 1}, PATH, group=group)
        with pytest.raises(ConfigError, match="rank 1 of the job is not in `group`"):
            distributed.load(PATH, {"n": 1}, group=group)


# -- what differs between ranks, and whether one file can hold it ----------------------------------

LARGE = 2**19 + 123  # more than 1 MiB of float32


def in_file(state: Any, **options: Any) -> Any:
    """Save, and return what is in the file. Collective."""
    distributed.save(state, PATH, timeout=30, **options)
    dist.barrier()
    return torch.load(PATH)


def keeps(state: dict[str, Any], *words: str, **options: Any) -> None:
    """Make sure that a state is refused, and that the old file stays. Collective."""
    before = PATH.read_bytes()
    dist.barrier()
    error = refused(lambda: in_file(state, **options), None)
    assert all(word in str(error) for word in words), error
    dist.barrier()
    assert PATH.read_bytes() == before
    assert [one.name for one in PATH.parent.iterdir()] == [PATH.name]


def plain_tensors() -> None:
    """They are compared in the first save, and in those that go by its plan."""
    state = {"w": torch.ones(LARGE), "b": torch.zeros(3)}
    in_file(state)
    told = ("'w'", "rank 0 and rank 2", "FlatShard", "broadcast")
    for change in (lambda: state["w"].fill_(RANK // 2), lambda: state.update(more=torch.ones(2))):
        change()
        keeps(state, *told)
    state["w"].fill_(1)
    in_file(state)
    columns = torch.ones(700, 1000).t()
    columns[:, 10:] = float(RANK)
    keeps({"columns": columns}, "'columns'", "rank 0 and ranks 1, 2")


def all_bytes() -> None:
    """One element, which no sample meets, differs."""
    for tensor in (torch.zeros(LARGE), torch.zeros(1000, 700).t()):
        tensor[(5,) * (tensor.dim() - 1) + (601,)] = float(RANK == 1)
        in_file({"w": tensor})
        with fastserial.options(compare="all"):
            keeps({"w": tensor}, "'w'", "rank 0 and rank 1")
            in_file({"w": torch.ones_like(tensor)})
    with fastserial.options(compare="all" if RANK == 1 else "sampled"):
        keeps({"w": torch.ones(LARGE)}, 'rank 1: its option compare is "all"')


def stages() -> None:
    """With merge="union" those that have a tensor are compared."""
    state = {f"of {RANK // 2}": torch.full((LARGE,), float(RANK // 2)), "n": {RANK: RANK}}
    found = in_file(state, merge="union")
    assert found["n"] == {0: 0, 1: 1, 2: 2}
    assert [found[f"of {stage}"].unique().tolist() for stage in (0, 1)] == [[0], [1]]
    state = {f"of {RANK // 2}": torch.full((LARGE,), float(RANK))}
    keeps(state, "'of 0'", "rank 0 and rank 1", merge="union")


def small_ones() -> None:
    """The file has rank 0's, and rank 0 says so once, of the line that saves."""
    for number in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = in_file({"a": torch.full((9,), float(RANK)), "n": RANK})
        texts = [str(one.message) for one in caught]
        keys = ["'a'", "'n'"] if RANK == 0 and number == 0 else []
        assert len(texts) == len(keys), texts
        for key, text in zip(keys, texts, strict=True):
            assert key in text
            assert "ranks 1, 2" in text
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
            found = in_file({"model": module})["model"]
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
        assert in_file(state)["arguments"] == {"lr": 1.0}
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
    error = refused(lambda: distributed.load(PATH, state, timeout=30), None)
    assert all(word in str(error) for word in words), error
    state["more"] = scheduler.state_dict()
    assert in_file(state)["more"] == scheduler.state_dict()
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
            refused(lambda: checkpointer.save(1), None, re.escape(word))
            assert checkpointer.resume() == 0


def planners() -> None:
    """`FastSavePlanner` saves the first rank's tensor as a whole, and says so."""
    path = FOLDER / "dcp"
    state = {"same": torch.ones(LARGE), "large": torch.full((LARGE + 9,), float(RANK)), "n": 3}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.save(state, storage_writer=FastStorageWriter(path), planner=FastSavePlanner())
    texts = [str(one.message) for one in caught if "plain tensors or values of" in str(one.message)]
    assert len(texts) == (RANK == 0), texts
    assert all("ranks 1, 2" in text and "'large'" in text for text in texts), texts
    found = {"same": torch.zeros(LARGE), "large": torch.full((LARGE + 9,), 7.0)}
    dcp.load(found, checkpoint_id=path)
    assert found["same"].unique().tolist() == [1]
    assert found["large"].unique().tolist() == [0]


CASES = (
    *(states, full_disk, interrupted, silent, late, broken_off, uncloned, arguments),
    *(code_of_the_user, outside_the_group),
)


DIFFERENT = (
    *(plain_tensors, all_bytes, stages, small_ones, buffers, keys, odd_tensors_and_objects),
    *(checkpoints, planners),
)


def main() -> None:
    PATH.parent.mkdir(exist_ok=True)
    if sys.argv[2] == "differ":
        save()
        each(DIFFERENT)
        return
    for case in CASES if sys.argv[2] == "all" else (unseen,):
        save()
        dist.barrier()
        before = PATH.read_bytes()
        dist.barrier()
        with fastserial.options(small_file=0):  # by an engine
            case()
        dist.barrier()
        assert PATH.read_bytes() == before, case.__name__
        assert os.listdir(PATH.parent) == [PATH.name], case.__name__
        print(case.__name__, flush=True)
    save()


main()
