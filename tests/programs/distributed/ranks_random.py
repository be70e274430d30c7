"""A rank: random states through ours and stock's, and how they compare: `SCENE FOLDER SEED CASES`.

`save`, `safetensors`: the bytes are stock's. `load`: any file, or folder of DCP, fills any
placement. `by_dcp`: storage and planners are ours or stock's by chance, in saves and in loads.

In `save` and `by_dcp` every other state is the one before it, of which one thing has changed: what
was kept of that save must not be used for it.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import ranks
from support.corpus import TORCH, aligned
from support.loading import tensors
from support.nests import blank, differing, like
from support.sharded import DTYPES, NEWER, Holder, hold, meshes, noise, random_tensor, vary
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import fastserial
from fastserial import distributed
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)
from fastserial.distributed.load import read_plan
from fastserial.distributed.state.tables import SHARED_FROM
from fastserial.formats.safetensors import TYPE_NAMES
from fastserial.saving import incremental

State = dict[str, Any]
Put = Callable[[str, Any, Any], None]  # a key, what this rank has, and all of it


def random_state(
    chance: random.Random,
    held: Callable[[torch.Tensor], Any],
    odd: Callable[[Put, str, torch.Tensor], None],
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> tuple[State, State]:
    """Return a state, and the whole of it (the same on every rank).

    Args:
        held: returns what this rank has of a tensor.
        odd: puts what is not just held, instead of some tensors.
    """
    state: State = {}
    whole: State = {}

    def put(key: str, mine: Any, full: Any) -> None:
        state[key], whole[key] = mine, full

    for index in range(chance.randrange(1, 8)):
        largest = (150, 3) if chance.random() < 0.15 else (9, 4)
        full = random_tensor(chance, *largest, dtype=chance.choice(dtypes))
        key = f"{chance.choice('zyxab')}.{index}"
        if chance.random() < 0.7:
            put(key, held(full), full)
        else:
            odd(put, key, full)
    if chance.random() < 0.3:
        key = chance.choice(list(state))
        put("tied", state[key], whole[key])
    return state, whole


def random_states(
    cases: str,
    chance: random.Random,
    held: Callable[[torch.Tensor], Any],
    odd: Callable[[Put, str, torch.Tensor], None],
) -> Iterator[tuple[int, State, State]]:
    """Yield numbers, states and their wholes: every other one is the one before it, but varied."""
    state: State = {}
    whole: State = {}
    for case in range(int(cases)):
        if case % 2:
            vary(chance, state, whole, held)
        else:
            state, whole = random_state(chance, held, odd)
        yield case, state, whole


# -- one file --------------------------------------------------------------------------------------

# Of storages in the file: many ranks need a multiple of 16.
ALIGNMENTS = (64, 64, 64, 16, 4096) if TORCH >= (2, 7) else (64,)
WRAPS: list[Any] = [
    *[lambda state: state] * 3,
    lambda state: {"a": OrderedDict(state), "b": [1]},
    lambda state: [*state.values()],
]


def clone(fd: int, base: int, offset: int, nbytes: int) -> None:
    """Do what a file system with reflinks does."""
    assert offset % 4096 == nbytes % 4096 == 0
    assert os.pwrite(fd, os.pread(base, nbytes, offset), offset) == nbytes


def save(place: str, seed: str, cases: str) -> None:
    """A file may be the base of the next one."""
    incremental.clone_range = clone
    folder, chance, rank = Path(place), random.Random(int(seed)), dist.get_rank()
    held = partial(hold, chance, grids=meshes(dist.get_world_size()), flat=0.2)
    (folder / "stock").mkdir(exist_ok=True)

    def odd(put: Put, key: str, full: torch.Tensor) -> None:
        kind = chance.randrange(3)
        if kind == 0:
            size = chance.choice([100, 3 * 2**20 + 5])
            full = noise([size], torch.uint8, chance.randrange(2**31))
            # ranks but the first do not look into an object, and write parts of its tensor
            put(key, *[chance.choice([full, SimpleNamespace(x=full)])] * 2)
        elif kind == 1:
            # A small tensor may differ: the file is what rank 0 would have written.
            mine = torch.zeros_like(full) if rank and full.nbytes < SHARED_FROM else full
            put(key, mine, full)
            half = full.numel() // 2
            put(f"{key}.view", mine.flatten()[:half], full.flatten()[:half])
        else:
            values = [3, "text", None, [1, 2.5, -0.0], b"x" * 100, "x" * 300_000, 2**80]
            put(key, *[chance.choice(values)] * 2)

    cloned = 0
    before: Path | None = None
    for case, state, whole in random_states(cases, chance, held, odd):
        if case % 2 == 0:
            wrap = chance.choice(WRAPS)
        state["step"] = whole["step"] = case * 100
        base = chance.choice([None, before])
        name = base.name if base else chance.choice(["file.pt", "longer name.pt"])
        path, stock = folder / name, folder / "stock" / name
        alignment = chance.choice(ALIGNMENTS)
        with (
            aligned(alignment) if alignment != 64 else nullcontext(),
            chance.choice([nullcontext, nullcontext, torch.inference_mode])(),
        ):
            writers = chance.choice(["all", "all", "node", 2, 1])
            report = distributed.save(wrap(state), path, writers=writers, timeout=30, base=base)
            cloned, before = cloned + report.cloned, path
            if rank == 0:
                torch.save(wrap(whole), stock)
        if rank == 0:
            a, b = path.read_bytes(), stock.read_bytes()
            pairs = zip(a, b, strict=False)
            at = next((i for i, (x, y) in enumerate(pairs) if x != y), -1) if a != b else None
            assert at is None, f"case {case}: {len(a)} and {len(b)} bytes, from {at}: {whole}"
            left = {found.name for found in folder.iterdir()} - {"file.pt", "longer name.pt"}
            assert left == {"stock"}, left
    dist.barrier()
    assert cloned or rank or int(cases) < 200, "no case clones"


# -- a Hugging Face folder -------------------------------------------------------------------------

SAFE_DTYPES = [one for one in DTYPES if str(one).removeprefix("torch.") in TYPE_NAMES]


def safetensors(place: str, seed: str, cases: str) -> None:
    """Prints how many folders have several files."""
    chance, rank = random.Random(int(seed)), dist.get_rank()
    held = partial(hold, chance, grids=meshes(dist.get_world_size()), flat=0)
    several = 0

    def odd(put: Put, key: str, full: torch.Tensor) -> None:
        turned = full.dim() == 2 and chance.random() < 0.5
        put(key, full.t().contiguous().t() if turned else full, full)

    for case in range(int(cases)):
        state, whole = random_state(chance, held, odd, SAFE_DTYPES)
        tied = whole.pop("tied", None)
        if tied is not None and not tied.numel():
            del state["tied"]
        most = chance.choice([1000, 50_000, 50_000_000_000])
        writers = chance.choice(["all", "node", 2])
        target = Path(place, f"case {case}")
        # which concerns zips alone
        with aligned(8) if case % 2 and TORCH >= (2, 7) else nullcontext():
            report = distributed.save(
                state, target, format="safetensors", shard_nbytes=most, writers=writers, timeout=30
            )
        assert report.container == "safetensors"
        if rank == 0:
            several += compare_folder(target, whole, most)
        into = {key: torch.zeros_like(tensor) for key, tensor in state.items() if key != "tied"}
        distributed.load(target, into, timeout=30)
        assert not differing(into, {key: state[key] for key in into}), case
        dist.barrier()
        if rank == 0:
            shutil.rmtree(target)
        dist.barrier()
    print(several)


def compare_folder(target: Path, whole: State, most: int) -> bool:
    """Compare with what safetensors writes; return whether there are several files."""
    # the other ranks need not import what only compares
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save as bytes_of

    parts = split_torch_state_dict_into_shards(whole, max_shard_size=most)
    names = set(parts.filename_to_tensors) or {"model.safetensors"}
    index = target / "model.safetensors.index.json"
    assert {path.name for path in target.iterdir()} - {index.name} == names, target
    for name in names:
        keys = parts.filename_to_tensors.get(name, [])
        wanted = bytes_of({key: whole[key].contiguous() for key in keys}, {"format": "pt"})
        assert (target / name).read_bytes() == wanted, (target, name)
    assert index.exists() is (len(names) > 1)
    if len(names) > 1:
        assert json.loads(index.read_text())["weight_map"] == parts.tensor_to_filename
    return len(names) > 1


# -- torch.distributed.checkpoint ------------------------------------------------------------------

# Its planners refuse some strided shards, and get others wrong; later ones do if they are uneven.
STOCK_IS_WRONG = torch.__version__.startswith("2.6.")


def wrapped(state: State, nested: bool) -> State:
    """Return nests that differ where planners flatten them to the same."""
    return {"m": dict(state)} if nested else {f"m.{key}": value for key, value in state.items()}


def is_for_ours_only(state: State) -> bool:
    """Return whether stock's planners may get a state wrong: it could not read its own files."""
    for value in state.values():
        if not isinstance(value, DTensor):
            continue
        if value._local_tensor.dtype is not value.dtype:
            return True
        for place in value.placements:
            if isinstance(place, _StridedShard):
                splits = zip(value.placements, value.device_mesh.shape, strict=True)
                count = math.prod(
                    n for other, n in splits if getattr(other, "dim", -1) == place.dim
                )
                if value.shape[place.dim] % count:
                    return True
    return STOCK_IS_WRONG


def by_dcp(place: str, seed: str, cases: str) -> None:
    chance, rank = random.Random(int(seed)), dist.get_rank()
    grids = meshes(dist.get_world_size())

    def held(full: torch.Tensor) -> Any:
        return full.clone() if chance.random() < 0.3 else hold(chance, full, grids, flat=0)

    def odd(put: Put, key: str, full: torch.Tensor) -> None:
        if chance.random() < 0.6:
            put(key, *[chance.choice([3, "text", None, [1, 2.5], {"a": b"x"}])] * 2)
            return
        full = noise([chance.choice([3, 700]), 5000], torch.float32, chance.randrange(2**31))
        put(key, full.clone(), full)
        put(f"{key} turned", full.clone().t(), full.clone().t())

    for case, state, whole in random_states(cases, chance, held, odd):
        path = Path(place, str(case % 3))
        ours = chance.random() < 0.75
        writer: Any = FastStorageWriter(path) if ours else dcp.FileSystemWriter(path)
        ours_plans = chance.random() < 0.6 or is_for_ours_only(state)
        save_planner = FastSavePlanner() if ours_plans else None
        ours_plans = chance.random() < 0.7
        reader: Any = dcp.FileSystemReader(path)
        if chance.random() < 0.7:
            reader = FastStorageReader(path, verify=chance.random() < 0.8)
        nested = chance.random() < 0.5
        saved: Any = dcp.save(wrapped(state, nested), storage_writer=writer, planner=save_planner)
        choices = chance.randrange(2**31)
        found = blank(whole, Holder(choices, grids, flat=0, zeros=True))
        want = like(whole, Holder(choices, grids, flat=0))
        load_planner = None
        if ours_plans or is_for_ours_only(found):
            load_planner = FastLoadPlanner()
        into = wrapped(found, nested)
        dcp.load(into, storage_reader=reader, planner=load_planner)
        assert not differing(into, wrapped(want, nested)), f"case {case}"
        dist.barrier()
        if ours:
            told = FastStorageReader(path).read_metadata()
            for part in ("storage_data", "state_dict_metadata", "planner_data"):
                assert getattr(saved, part) == getattr(told, part), (case, part)
            if rank == 0:
                needed = {place.relative_path for place in told.storage_data.values()}
                assert set(os.listdir(path)) == needed | {".metadata"}, (case, os.listdir(path))
        dist.barrier()


# -- loads -----------------------------------------------------------------------------------------

LARGE = [[300, 70], [5000], [64, 65, 9], [1, 9000], [2500, 3]]


def saved(chance: random.Random) -> State:
    """Return what a file holds: plain, transposed, sliced, tied and other tensors, and values."""
    nest: State = {"step": chance.randrange(100), "deep": {"list": [], "name": "x"}}
    kept: list[torch.Tensor] = []
    for number in range(chance.randrange(1, 6)):
        full = random_tensor(chance)
        if chance.random() < 0.3:
            full = noise(chance.choice(LARGE), full.dtype, chance.randrange(2**31))
        odd = chance.random()
        if full.dim() > 1 and odd < 0.2:
            full = full.transpose(0, chance.randrange(1, full.dim()))
        elif full.dim() and odd < 0.35:
            dim = chance.randrange(full.dim())
            full = full.narrow(dim, 0, full.shape[dim] // 2)
        elif full.dim() and odd < 0.4:
            full = full.flatten()[:: chance.randrange(1, 4)]
        elif full.dim() == 1 and odd < 0.5:
            full = full.expand(3, -1)
        elif full.numel() > 8 and odd < 0.55:
            full = full.flatten().as_strided((3, 3), (2, 1))  # its elements overlap
        elif kept and odd < 0.65:
            full = chance.choice(kept)
            if full.dim() and chance.random() < 0.6:  # another part of its storage
                full = full.narrow(0, full.shape[0] // 2, -(-full.shape[0] // 2))
        elif full.is_complex() and odd < 0.8:
            full = torch.ones_like(full).mul_(complex(chance.random(), 2)).conj()  # without NaNs
        kept.append(full)
        if chance.random() < 0.3:
            nest["deep"]["list"].append(full)
        else:
            nest[f"t{number}"] = full
    return nest


def load(place: str, seed: str, cases: str) -> None:
    """Each target is made twice, from zeros and from what was saved, by torch alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = [count for count in (1, 2, 3, 4, 6, 8) if count <= world]
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    grids = {count: meshes(count) for count in counts}
    moved = verified = 0
    for case in range(int(cases)):
        chance = random.Random(f"{seed}/{case}")
        count = chance.choice(counts)
        nest = saved(chance)
        path = Path(place, f"{case}.pt")
        form = chance.choice(["zip", "zip", "legacy", "dcp"])
        broadcast, check = (chance.random() < p for p in (0.7, 0.5))
        block, window = chance.choice([64, 256, 4096]), chance.choice([4096, 65536])
        zipped = form != "legacy" or any(one.dtype in NEWER for one in tensors(nest))
        choices = chance.randrange(2**31)
        planner = DefaultSavePlanner(flatten_state_dict=chance.random() < 0.7)
        writer_of = chance.choice([FastStorageWriter, dcp.FileSystemWriter])
        if rank == 0 and form == "dcp":
            dcp.save(nest, storage_writer=writer_of(path), planner=planner, no_dist=True)
        elif rank == 0:
            torch.save(nest, path, _use_new_zipfile_serialization=zipped)
        dist.barrier()
        if rank >= count:
            continue
        direct = chance.choice(["auto", True])
        into = blank(nest, Holder(choices, grids[count], made=0.1, zeros=True))
        want = like(nest, Holder(choices, grids[count], made=0.1))
        with (
            mock.patch.object(read_plan, "_FINEST", block),
            mock.patch.object(read_plan, "_LARGEST_WINDOW", window),
            fastserial.options(verify_on_load=check, direct=direct),
        ):
            report = distributed.load(
                path, into, group=groups[count], broadcast=broadcast, timeout=60
            )
        for key in differing(into, want):
            raise AssertionError(f"seed {seed}, case {case}, {count} ranks: {key} of {nest}")
        assert fastserial.last_load_report() == report
        assert report.verified <= check
        assert broadcast or not any(line.sent_bytes for line in report.ranks), report
        moved += sum(line.sent_bytes for line in report.ranks)
        verified += report.verified
    print({"moved": moved, "verified": verified})


ranks.main(globals())
