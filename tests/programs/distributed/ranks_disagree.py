"""Ranks that make different calls, or have different tensors where they should be equal."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import ranks
from support.sharded import split
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastserial
from fastserial import distributed
from fastserial.distributed.comm import group
from fastserial.distributed.comm.group import RankGroup
from fastserial.distributed.save.partition import FilePlan, Partition
from fastserial.distributed.state import walk
from fastserial.distributed.state.agreement import Agreement
from fastserial.errors import DistributedError, LoadMismatchError, MismatchedCallError

MIB = 1024 * 1024
TIMEOUT = 5


# -- calls -----------------------------------------------------------------------------------------


def state_of(step: int) -> dict[str, Any]:
    rank, count = dist.get_rank(), dist.get_world_size()
    part = torch.full((MIB,), step, dtype=torch.int32)
    return {
        "shards": distributed.FlatShard((count * MIB,), part.dtype, rank * MIB, MIB, part),
        "step": step,
    }


def save(step: int, path: Path) -> None:
    distributed.save(state_of(step), path, timeout=TIMEOUT)


def save_async(step: int, path: Path) -> None:
    distributed.save_async(state_of(step), path, timeout=TIMEOUT).wait()


def steps_in(path: Path) -> set[int]:
    found = torch.load(path)
    return {found["step"], *found["shards"].unique().tolist()}


def calls(folder: str, seed: str, count: str, control: str = "") -> None:
    """Skip, repeat or rename calls on one rank now and then; print how many calls worked.

    Every file is of one step. A call works that all ranks make, like the two before it.
    """
    if control:
        RankGroup.match_calls = lambda comm: None  # type: ignore[method-assign]
        walk.STEPS = ()  # type: ignore[assignment]
    chance, me, size = random.Random(int(seed)), dist.get_rank(), dist.get_world_size()
    deviations, worked, mixed = [-10], 0, 0
    for step in range(int(count)):
        victim, what = -1, ""
        if chance.random() < 0.3:
            deviations.append(step)
            victim = chance.randrange(size)
            what = chance.choice(["skip"] if control else ["skip", "repeat", "rename", "other"])
        path = Path(folder, chance.choice(["latest.pt", f"step-{step}.pt"]))
        call = save if control else chance.choice([save, save_async])
        if me == victim and what == "rename":
            path = path.with_name("mine.pt")
        if me == victim and what == "other":
            call = save if call is save_async else save_async
        times = {"skip": 0, "repeat": 2}.get(what, 1) if me == victim else 1
        for _ in range(times):
            try:
                call(step, path)
            except MismatchedCallError as error:
                assert step - deviations[-1] <= 2, f"step {step}: {error}"
                assert str(error).count("distributed.save") == 2, error
                assert "rank" in str(error)
            except DistributedError:
                assert control
                return
            else:
                worked += 1
                # The next save starts when all ranks want it: nobody replaces the file before.
                mixed += me == 0 and len(steps_in(path)) > 1
    print(worked, mixed)


def steps(folder: str) -> None:
    """A step is compared where two ranks have it: others are values of rank 0, or of each rank."""
    me, path = dist.get_rank(), Path(folder, "x.pt")
    of_rank_0 = {"x": torch.ones(3), **({"step": 3} if me == 0 else {})}
    distributed.save(of_rank_0, path, timeout=TIMEOUT)
    of_each = {f"loader{me}": {"step": 5 + me}}
    distributed.save(of_each, path, timeout=TIMEOUT, merge="union")
    dist.barrier()
    assert torch.load(path) == {f"loader{rank}": {"step": 5 + rank} for rank in (0, 1)}
    for state in ({"step": me}, {"trainer": {"epoch": me}}):
        with pytest.raises(MismatchedCallError, match=r"(step|trainer\.epoch)=1.*\1=0"):
            distributed.save(state, path, timeout=TIMEOUT)


def waits(folder: str) -> None:
    """Rank 1 is late: the other one says so, in its first call and in later ones."""
    lines: list[str] = []
    log = logging.getLogger("fastserial")
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_PATIENCE", 0.5)
        for step in (1, 2):
            lines.clear()
            if dist.get_rank():
                time.sleep(1.5)
            save(step, Path(folder, "late.pt"))
            # a rank that comes last has not waited
            assert len(lines) == (dist.get_rank() == 0), lines
            assert all("rank 1" in line and "late.pt" in line for line in lines), lines


# -- replicas --------------------------------------------------------------------------------------

ROWS, COLUMNS = 64, 8192  # int32: 2 MiB


def replicas(chance: random.Random, mesh: Any) -> dict[str, torch.Tensor]:
    """Return tensors of which some rank may have other rows, or one other element."""
    me, found = dist.get_rank(), {}
    for number in range(4):
        whole = torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS) + number
        if chance.random() < 0.7:
            other = chance.randrange(dist.get_world_size())
            row, column = chance.randrange(ROWS), chance.randrange(COLUMNS)
            touched = slice(row, row + chance.choice([1, ROWS]))
            if me == other:
                whole[touched, column] += 1000 + other
        kind = chance.choice(["plain", "replicated", "hsdp"])
        if kind == "plain":
            found[f"{number}.plain"] = whole
        elif kind == "replicated":
            placements = [Replicate(), Replicate()]
            found[f"{number}.replicated"] = DTensor.from_local(
                whole, mesh, placements, run_check=False
            )
        else:
            rows = ROWS // mesh.size(1)
            first = mesh.get_local_rank(1) * rows
            part = whole[first : first + rows].clone()
            found[f"{number}.hsdp"] = DTensor.from_local(
                part, mesh, [Replicate(), Shard(0)], run_check=False
            )
    return found


def versions(state: dict[str, torch.Tensor], mesh: Any) -> list[dict[str, torch.Tensor]]:
    """Return what each replica of the tensors is, as a whole."""
    mine = {key: one.to_local() if isinstance(one, DTensor) else one for key, one in state.items()}
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    found = []
    for row in mesh.mesh.tolist():
        whole = {key: torch.cat([each[rank][key] for rank in row]) for key in mine if "hsdp" in key}
        found += [{**each[rank], **whole} for rank in row]
    return found


def tensors(folder: str, seed: str, count: str, control: str = "") -> None:
    """Each tensor of a file is, as a whole, what one rank had; print how often that is not so."""
    if control:
        Partition.__init__ = _divided  # type: ignore[method-assign]
    chance = random.Random(int(seed))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    mixed = refused = 0
    for case in range(int(count)):
        state, path = replicas(chance, mesh), Path(folder, f"{case}.pt")
        saved = True
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("warnings.warn", lambda *_, **__: None)
                distributed.save(state, path, timeout=TIMEOUT)
        except DistributedError as error:
            assert any(key in str(error) for key in state), error
            saved, refused = False, refused + 1
        had = versions(state, mesh)
        if saved and dist.get_rank() == 0:
            found = torch.load(path)
            mixed += sum(
                not any(torch.equal(whole, one[key]) for one in had) for key, whole in found.items()
            )
        dist.barrier()
        path.unlink(missing_ok=True)
    print(mixed, refused)


_init = Partition.__init__


def _divided(self: Partition, plan: FilePlan, *arguments: Any) -> None:
    _init(self, plan._replace(cuts_replicas=True), *arguments)


def compared(folder: str) -> None:
    """`compare="all"` finds what samples miss, also in the replicas of a DTensor.

    Each rank may have all of it on a mesh of its own.
    """
    names = ("replicas", "shards")
    meshes = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names)
    mesh = meshes["replicas"]
    for kind in ("plain", "replicated", "alone"):
        whole = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
        whole[1, 1] = dist.get_rank()
        if kind == "replicated":
            whole = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        elif kind == "alone":
            whole = DTensor.from_local(whole, meshes["shards"], [Shard(0)], run_check=False)
        path = Path(folder, f"{kind}.pt")
        distributed.save({kind: whole}, path, timeout=TIMEOUT)
        with fastserial.options(compare="all"), pytest.raises(DistributedError, match=kind):
            distributed.save({kind: whole}, path, timeout=TIMEOUT)


# -- states ----------------------------------------------------------------------------------------

# What one rank has otherwise, and what an error, or a warning of DCP, then names.
DIFFERENCES = {
    "rows": "", "element": "", "dtype": "0", "shape": "0", "missing": "0", "added": "added",
    "deep": "epoch", "setting": "param_groups", "small": "moments",
}  # fmt: skip
HEIGHT, WIDTH = 24, 40_000  # of a tensor: 3.7 MiB
PLACED: dict[str, tuple[Any, ...]] = {
    "fsdp": (Shard(0), Shard(0)), "hsdp": (Replicate(), Shard(0)), "tp": (Replicate(), Shard(1)),
    "fsdp+tp": (Shard(0), Shard(1)), "replicated": (Replicate(), Replicate()),
}  # fmt: skip


def random_state(chance: random.Random, mesh: Any) -> tuple[dict[str, Any], str]:
    """Return a state, of which one rank may have something else, and what that is."""
    kinds = chance.choices([*PLACED, "plain"], k=3)
    difference = chance.choice([*DIFFERENCES, ""])
    victim, row = chance.randrange(dist.get_world_size()), chance.randrange(HEIGHT)
    column, rows = chance.randrange(WIDTH), chance.choice([1, HEIGHT])
    what = difference if dist.get_rank() == victim else ""
    state: dict[str, Any] = {}
    for number, kind in enumerate(kinds):
        whole = torch.arange(HEIGHT * WIDTH, dtype=torch.int32).view(HEIGHT, WIDTH) + number
        if number == 0 and what == "rows":
            whole[row : row + rows] += 1000
        elif number == 0 and what == "element":
            whole[row, column] += 1000
        elif number == 0 and what == "dtype":
            whole = whole.to(torch.float32)
        elif number == 0 and what == "shape":
            whole = whole[:-4]
        if number == 0 and what == "missing":
            continue
        state[f"{number}"] = split(whole, mesh, list(PLACED[kind])) if kind in PLACED else whole
    if what == "added":
        state["added"] = 5
    state["deep"] = {"er": {"epoch": 1 + (what == "deep")}}
    moments = torch.full((3,), float(what == "small"))
    groups = [{"lr": 0.2 if what == "setting" else 0.1, "params": ["0"]}]
    state["opt"] = {"state": {"0": {"moments": moments}}, "param_groups": groups}
    return state, difference


def had(state: dict[str, Any], mesh: Any) -> list[dict[str, torch.Tensor]]:
    """Return what each replica of the tensors is, as a whole."""
    me = {"moments": state["opt"]["state"]["0"]["moments"]}
    placed: dict[str, Any] = {}
    for key, one in state.items():
        if isinstance(one, DTensor):
            me[key], placed[key] = one.to_local(), one.placements
        elif isinstance(one, torch.Tensor):
            me[key] = one
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, (me, placed))
    placements = {key: some for _, found in each for key, some in found.items()}
    found = [dict(tensors) for tensors, _ in each]
    for key, (outer, inner) in placements.items():
        grid = mesh.mesh.tolist()
        if not all(key in each[rank][0] for row in grid for rank in row):
            continue
        with contextlib.suppress(RuntimeError):  # shards of different shapes
            rows = [[each[rank][0][key] for rank in row] for row in grid]
            if inner.is_shard():
                rows = [[torch.cat(row, inner.dim)] for row in rows]
            if outer.is_shard():
                rows = [[torch.cat(list(one), outer.dim) for one in zip(*rows, strict=True)]]
            found += [{key: whole} for row in rows for whole in row]
    return found


def one_file(state: dict[str, Any], path: Path) -> None:
    distributed.save(state, path, timeout=TIMEOUT)


def one_file_async(state: dict[str, Any], path: Path) -> None:
    distributed.save_async(state, path, timeout=TIMEOUT).wait()


def dcp_folder(state: dict[str, Any], path: Path) -> None:
    ours = {
        "storage_writer": distributed.FastStorageWriter(path),
        "planner": distributed.FastSavePlanner(),
    }
    dcp.save(state, **ours)


def loaded(path: Path) -> dict[str, Any]:
    if path.is_dir():
        fastserial.convert(path, path.with_suffix(".whole"))
        path = path.with_suffix(".whole")
    return torch.load(path)  # type: ignore[no-any-return]


def states(folder: str, seed: str, count: str) -> None:
    """Save random states of which one rank may have something else; print what became of them.

    Each tensor of what is saved is, as a whole, what one rank had; or an error names the key. It
    prints how often that is not so, and how many saves were refused.
    """
    chance = random.Random(int(seed))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    mixed, refused = 0, 0
    for case in range(int(count)):
        state, difference = random_state(chance, mesh)
        call = chance.choice([one_file, one_file_async, dcp_folder])
        path, text = Path(folder, f"{case}"), ""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                call(state, path)
            except (DistributedError, LoadMismatchError, CheckpointException) as error:
                text = str(error)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, (text, [str(one.message) for one in warned]))
        assert len({text for text, _ in texts}) == 1 or call is dcp_folder, texts
        named = DIFFERENCES.get(difference, "")
        if call is not dcp_folder:
            must = difference in ("dtype", "shape", "missing", "deep", "setting", "small")
            assert text or not must, (difference, texts)
        elif difference in ("deep", "setting"):
            assert any(named in one for _, some in texts for one in some), (difference, texts)
        refused += bool(text)
        assert named in text or not text, (difference, text)
        assert difference or not text, text
        whole = had(state, mesh)
        if not text and dist.get_rank() == 0:
            found = loaded(path)
            found["moments"] = found["opt"]["state"]["0"]["moments"]
            for key, one in found.items():
                if isinstance(one, torch.Tensor):
                    same = [torch.equal(one, other[key]) for other in whole if key in other]
                    if not any(same):
                        mixed += 1
                        print("mixed", case, call.__name__, difference, key)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            for left in (path, path.with_suffix(".whole")):
                left.unlink(missing_ok=True)
    print(mixed, refused)


# -- values ----------------------------------------------------------------------------------------


def optimizer(**changed: Any) -> dict[str, Any]:
    """Return the state of an optimizer, on rank 1 with something changed."""
    mine = changed if dist.get_rank() == 1 else {}
    state = {"step": 7, "absmax": mine.get("absmax", torch.zeros(3)), "qmap": mine.get("qmap")}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"], **mine.get("group", {})}
    return {"state": {"w": {**state, **mine.get("state", {})}}, "param_groups": [group]}


DIFFERENT: dict[str, tuple[str, Any]] = {
    "a setting": (r"param_groups\[0\]\.lr' is 0\.2, that of rank 0 0\.1", {"group": {"lr": 0.2}}),
    "betas": (r"param_groups\[0\]\.betas' is \(0\.9, 1\)", {"group": {"betas": (0.9, 1)}}),
    "names": (r"param_groups\[0\]\.params' is \['v'\]", {"group": {"params": ["v"]}}),
    "a step": (r"state\.w\.step' is 8", {"state": {"step": 8}}),
    "a small tensor": (r"differ.*'opt\.state\.w\.absmax'", {"absmax": torch.ones(3)}),
}


def values(folder: str) -> None:
    """What must be equal is an error; of the rest the file has rank 0's, and a warning names it."""
    me, path = dist.get_rank(), Path(folder, "x.pt")
    for name, (words, changed) in DIFFERENT.items():
        for call in (distributed.save, distributed.save_async):
            state = {"opt": optimizer(**changed), "name": name}
            with pytest.raises(DistributedError, match=words):
                call(state, path, timeout=TIMEOUT)
    with pytest.raises(DistributedError, match=r"'deep\.er\.than\.epoch' is 1, that of rank 0 0"):
        state = {"deep": {"er": {"than": {"epoch": me}}}}
        distributed.save(state, path, timeout=TIMEOUT)
    dist.barrier()
    assert not path.exists()
    asked: list[int] = []
    real = Agreement.raise_if_different
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "raise_if_different", lambda *some: (asked.append(1), real(*some)))
        for number in range(3):
            own = {"history": [0.5, me], "host": f"host{me}", "small": torch.tensor([me, number])}
            rank_0 = {"only": 3} if me == 0 else {}
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                state = {"opt": optimizer(qmap=5 + me), "same": 3, **own, **rank_0}
                distributed.save(state, path, timeout=TIMEOUT)
            texts = [str(one.message) for one in found]
            assert len(texts) == (2 if number == me == 0 else 0), texts
            if texts:
                assert "'small'" in texts[0]
                assert "'history', 'host', 'opt.state.w.qmap'" in texts[1]
                assert "per_rank" in texts[1]
                assert "union" in texts[1]
            dist.barrier()
            loaded = torch.load(path)
            assert (loaded["host"], loaded["history"], loaded["only"]) == ("host0", [0.5, 0], 3)
            assert loaded["small"].tolist() == [0, number]
            dist.barrier()
    # what is known to differ is not looked at again: no rank sends the details
    assert len(asked) == 1, asked
    with pytest.raises(DistributedError, match="absmax"):
        state = {"opt": optimizer(absmax=torch.ones(3), qmap=5), "same": 3, "host": f"host{me}"}
        distributed.save(state, path, timeout=TIMEOUT)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        distributed.save({"host": f"host{me}", "new": me}, path, timeout=TIMEOUT)
    assert [str(one.message).count("'new'") for one in found] == ([1] if me == 0 else [])


def storages(folder: str) -> None:
    """Small tensors in storages of other sizes, or in none: the file is what rank 0 would save."""
    me, path, stock = dist.get_rank(), Path(folder, "x.pt"), Path(folder, "stock", "x.pt")
    emptied, large = torch.arange(40.0), torch.ones(MIB)
    if me:
        emptied.untyped_storage().resize_(0)
        large.untyped_storage().resize_(0)
    view, other = torch.arange(50)[:5], torch.arange(5)
    state = {"emptied": emptied, "view": (other, view)[me], "of view": (view, other)[me], "n": 3}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            distributed.save(state, path, timeout=TIMEOUT)
    texts = [str(one.message) for one in found]
    assert ["'emptied'" in text for text in texts] == ([] if me else [True]), texts
    ranks.alone(stock.parent.mkdir)
    ranks.alone(lambda: torch.save(state, stock))
    assert path.read_bytes() == stock.read_bytes()
    with pytest.raises(DistributedError, match=r"^rank 1: its 'large'"):
        distributed.save({"large": large}, path, timeout=TIMEOUT)


# -- subclasses ------------------------------------------------------------------------------------


class Pair(torch.Tensor):
    """As a quantized tensor: two tensors that show themselves as one."""

    @staticmethod
    def __new__(cls, low: torch.Tensor, high: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["low", "high"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> Pair:
        return cls(inner["low"], inner["high"])

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return Pair, (self.low, self.high)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(name: str) -> Any:
            inner = [getattr(one, name) if isinstance(one, Pair) else one for one in args]
            return func(*inner, **(kwargs or {}))

        low, high = run("low"), run("high")
        if not isinstance(low, torch.Tensor):
            return low
        return args[0] if func is torch.ops.aten.copy_.default else cls(low, high)


def of_pair(value: float) -> torch.Tensor:
    return Pair(torch.full((4, 8), value), torch.full((4, 8), -value))


def of_torchao(name: str, value: float) -> torch.Tensor:
    """Return a quantized weight, or a quantized state of an optimizer."""
    if name == "OptimState8bit":
        from torchao.optim.subclass_8bit import OptimState8bit

        state: torch.Tensor = OptimState8bit.zeros((4, 256))
        return state.copy_(torch.linspace(-value, value, 1024).view(4, 256))
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(32, 4, bias=False)
    layer.weight.data.copy_(torch.linspace(-value, value, 128).view(4, 32))
    quantize_(layer, Float8WeightOnlyConfig())
    return layer.weight.data


def inner(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a subclass consists of, as bytes."""
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name).contiguous().view(torch.uint8) for name in names]


def subclasses(folder: str, kind: str = "Pair") -> None:
    """Shards of a class of their own: DCP saves and loads them as stock does, others refuse."""
    mesh, me = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    make = of_pair if kind == "Pair" else partial(of_torchao, kind)

    def made(value: float) -> dict[str, Any]:
        return {"x": DTensor.from_local(make(value), mesh, [Shard(0)], run_check=False)}

    # beside a plain one of the same kind, as of an optimizer with states of both
    shape = tuple(make(1.0).shape)
    plain = DTensor.from_local(torch.zeros(shape), mesh, [Shard(0)], run_check=False)
    for call in (distributed.save, distributed.save_async):
        with pytest.raises(LoadMismatchError, match=f"x: its shards are of the class {kind}"):
            call({"plain": plain, **made(1.0)}, Path(folder, "x.pt"), timeout=TIMEOUT)
    assert not Path(folder, "x.pt").exists()
    torch.serialization.add_safe_globals([Pair])
    ours = {
        "storage_writer": distributed.FastStorageWriter(f"{folder}/ours"),
        "planner": distributed.FastSavePlanner(),
    }
    for name, how in (("stock", {"checkpoint_id": f"{folder}/stock"}), ("ours", ours)):
        dcp.save(made(7.0 + me), **how)
        ranks.alone(lambda: None)
        reader = {"storage_reader": distributed.FastStorageReader(f"{folder}/{name}")}
        planner = {"planner": distributed.FastLoadPlanner()}
        for how in ({"checkpoint_id": f"{folder}/{name}"}, {**reader, **planner}):
            found = made(1.0)
            dcp.load(found, **how)
            for one, other in zip(
                inner(found["x"]._local_tensor), inner(make(7.0 + me)), strict=True
            ):
                assert torch.equal(one, other)


SCENES = (calls, steps, waits, tensors, states, compared, values, storages, subclasses)
ranks.main({scene.__name__: scene for scene in SCENES})
