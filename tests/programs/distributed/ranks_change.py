"""A rank of three: saves states that change a little each time, and compares with stock.

And which changes need a new plan. Arguments: folder.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.ranks import join
from support.sharded import noise, split
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fastserial import distributed
from fastserial.distributed import FlatShard
from fastserial.distributed.onefile import saver
from fastserial.errors import DistributedError

Pair = collections.namedtuple("Pair", "first second")
State = dict[str, Any]
LARGE = 2 * 2**20
LONG = "x" * 300_000


class Other:
    """Pickles itself otherwise each time."""

    count = 0

    def __reduce__(self) -> Any:
        return str, (f"{Other.count}",)


class Maker:
    """Makes a state, or the whole of it."""

    def __init__(self, rank: int, count: int, whole: bool) -> None:
        self.rank, self.count, self.whole = rank, count, whole
        self.meshes = [DeviceMesh("cpu", torch.arange(count)) for _ in range(2)]

    def sharded(self, seed: int, shape: list[int], *placement: Any, **options: Any) -> Any:
        full = noise(shape, options.get("dtype", torch.float32), seed)
        if self.whole:
            return full
        mesh = self.meshes[options.get("mesh", 0)]
        return split(full, mesh, list(placement) or [Shard(0)])

    def flat(self, seed: int, cut: int) -> Any:
        full = noise([60], torch.float32, seed)
        if self.whole:
            return full
        ends = [0, cut, 40, 60]
        first, stop = ends[self.rank], ends[self.rank + 1]
        return FlatShard((60,), full.dtype, first, stop - first, full[first:stop].clone())

    def state(self, seed: int = 1) -> State:
        large = noise([LARGE], torch.uint8, seed + 3)
        return {
            "a": self.sharded(seed, [301, 70]),
            "b": [self.sharded(seed + 1, [4, 50]), 5, {"c": self.flat(seed + 2, 20)}, 6],
            "large": large,
            "view": large[7:],
            "small": torch.nn.Parameter(noise([9], torch.float64, seed + 4)),
            "buffer": noise([3], torch.int64, seed + 5),
            "step": 3,
            "values": (1.5, True, None, 12, -1, {0: 2, 1: 2.5}),
            "options": argparse.Namespace(rate=0.1, name="run", epoch=7),
            "text": "cpu",
        }


def changed(key: str, value: Any) -> Callable[[Maker, State], None]:
    return lambda make, state: state.__setitem__(key, value)


def placed(**options: Any) -> Callable[[Maker, State], None]:
    return lambda make, state: state.__setitem__("a", make.sharded(1, [301, 70], **options))


def swapped(make: Maker, state: State) -> None:
    state["step"], state["a"] = state["a"], state["step"]


def reordered(make: Maker, state: State) -> None:
    state["a"] = state.pop("a")


def tied(make: Maker, state: State) -> None:
    state["b"][0] = state["a"]


def own_view(make: Maker, state: State) -> None:
    state["view"] = state["view"].clone()


def larger_storage(make: Maker, state: State) -> None:
    state["buffer"] = noise([8], torch.int64, 6)[:3]


def strides(make: Maker, state: State) -> None:
    state["large"] = state["large"].view(-1, 2).t()


def on_one(rank: int, key: str, value: Any) -> Callable[[Maker, State], None]:
    """Only rank 0 counts, where no tensor is."""

    def change(make: Maker, state: State) -> None:
        if make.rank == rank and not (make.whole and rank):
            state[key] = value

    return change


def options(make: Maker, state: State) -> None:
    state["options"].epoch = 300


def inner(make: Maker, state: State) -> None:
    state["values"] = (-0.0, 1, None, float("nan"), 2**40, {0: 3, 1: 2.5})


def frozen(make: Maker, state: State) -> None:
    state["small"].requires_grad_(False)


def trained(make: Maker, state: State) -> None:
    state["a"] = state["a"].requires_grad_(True)


def halved(make: Maker, state: State) -> None:
    """Shards of another type; what the DTensor says of itself stays."""
    if make.whole:
        state["a"] = state["a"].half()
    else:
        state["a"]._local_tensor = state["a"]._local_tensor.half()


def plain(make: Maker, state: State) -> None:
    state["small"] = state["small"].detach()


# What changes, and whether a kept plan does for it.
CHANGES: dict[str, tuple[Callable[[Maker, State], Any], bool]] = {
    "nothing": (lambda make, state: None, True),
    "bytes": (lambda make, state: state.update(make.state(50)), True),
    "step": (changed("step", 200), True),
    "inner": (inner, True),
    "options": (options, True),
    "text": (changed("text", "gpu"), True),
    "same text": (changed("text", "".join(["c", "pu"])), True),
    "kind": (changed("step", "3"), True),
    "key": (lambda make, state: state.__setitem__("A", state.pop("a")), False),
    "order": (reordered, False),
    "swapped": (swapped, False),
    "shape": (lambda make, s: s.__setitem__("a", make.sharded(1, [300, 70])), False),
    "dtype": (placed(dtype=torch.int32), False),
    "type of the shards": (halved, False),
    "placement": (lambda m, s: s.__setitem__("a", m.sharded(1, [301, 70], Shard(1))), False),
    "replica": (
        lambda m, s: s.__setitem__("a", m.sharded(1, [301, 70], Replicate())),
        False,
    ),
    "flat": (lambda make, s: s["b"][2].__setitem__("c", make.flat(3, 11)), False),
    "tied": (tied, False),
    "own view": (own_view, False),
    "larger storage": (larger_storage, False),
    "strides": (strides, False),
    "frozen": (frozen, True),
    "trained": (trained, True),
    "plain": (plain, False),
    "pair": (lambda make, s: s.__setitem__("b", Pair(s["b"][0], s["b"][2])), False),
    "object": (changed("step", Other()), True),
    "mesh": (placed(mesh=1), True),
    "on rank 0": (on_one(0, "step", 9), True),
    "on rank 1": (on_one(1, "step", 9), True),
    "text on rank 1": (on_one(1, "text", "another text"), True),
}


def main() -> None:
    rank, count = join()
    folder = Path(sys.argv[1])
    (folder / "stock").mkdir(exist_ok=True)
    make, whole = Maker(rank, count, False), Maker(rank, count, True)
    planned: list[str] = []

    def same(
        name: str,
        change: Callable[[Maker, State], Any],
        file: str,
        last: tuple[State, State] | None = None,
        **more: Any,
    ) -> tuple[State, State]:
        """Change a state, by default a new one, save it and compare; return it. Collective.

        What was made anew is noted.
        """
        mine, full = last or (make.state(), whole.state())
        change(make, mine)
        change(whole, full)
        with mock.patch.object(saver, "schedule", wraps=saver.schedule) as plan:
            distributed.save(mine, folder / file, timeout=30, **more)
        planned.append(f"{name}: {plan.call_count}")
        if rank == 0:
            torch.save(full, folder / "stock" / file)
            assert (folder / file).read_bytes() == (folder / "stock" / file).read_bytes(), name
        dist.barrier()
        return mine, full

    nothing = CHANGES["nothing"][0]
    for name, (change, kept) in CHANGES.items():
        for of_the_same in (False, True):
            last = same("", nothing, "file.pt")
            same(name, change, "file.pt", last if of_the_same else None)
            wanted = f"{name}: {0 if kept else 1}"
            assert planned[-1] == wanted, (planned[-1], wanted, of_the_same)
            Other.count += 1
    for file in ("file.pt", "gile.pt", "longer name.pt", "file.pt"):
        same(file, nothing, file)
    for step in (1, 255, 256, 65535, 65536, 2**31, 2**80, 0):
        same(str(step), changed("step", step), "file.pt")
    for step in (3, 4, 5):
        same("long", lambda make, state, step=step: state.update(step=step, long=LONG), "f.pt")
    assert planned[-2:] == ["long: 0"] * 2, planned[-3:]
    for writers in (1, 2, "all"):
        same(str(writers), nothing, "file.pt", writers=writers)
    failing(make, folder, rank)
    same("again", nothing, "file.pt")
    print("done")


def failing(make: Maker, folder: Path, rank: int) -> None:
    """A tensor of another shape on one rank only is an error, also if the others keep a plan."""
    before = (folder / "file.pt").read_bytes()
    for number in range(3):
        state = make.state()
        if rank == number:
            state["large"] = state["large"].clone()[:-1]
        try:
            distributed.save(state, folder / "file.pt", timeout=30)
        except DistributedError as error:
            assert "large" in str(error), error
        else:
            raise AssertionError("no error")
    assert (folder / "file.pt").read_bytes() == before


main()
