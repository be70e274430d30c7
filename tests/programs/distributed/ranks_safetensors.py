"""A rank: saves random tensors as safetensors; rank 0 compares with what safetensors writes.

Arguments: folder, seed, cases.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.corpus import TORCH, aligned
from support.ranks import join
from support.sharded import hold, meshes, random_tensor

from fastserial import distributed
from fastserial.formats.safetensors import TYPE_NAMES


def random_tensors(chance: random.Random, grids: list[Any]) -> tuple[Any, Any]:
    """Return tensors, and the same as a whole."""
    state: dict[str, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for index in range(chance.randrange(1, 12)):
        full = random_tensor(chance, *((300, 3) if chance.random() < 0.2 else (9, 4)))
        if str(full.dtype).removeprefix("torch.") not in TYPE_NAMES:
            continue
        key = f"{chance.choice('zyxab')}.{index}"
        whole[key] = full
        if chance.random() < 0.7:
            state[key] = hold(chance, full, grids, flat=0)
        elif full.dim() == 2 and chance.random() < 0.3:
            state[key] = full.t().contiguous().t()
        else:
            state[key] = full
    if whole and chance.random() < 0.3:  # tied weights
        first = next(iter(whole))
        if whole[first].numel():
            state["tied"] = state[first]
    return state, whole


def main() -> None:
    rank, count = join()
    folder, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    grids = meshes(count)
    several = 0
    for case in range(cases):
        state, whole = random_tensors(chance, grids)
        most = chance.choice([1000, 50_000, 50_000_000_000])
        writers = chance.choice(["all", "node", 2])
        target = folder / f"case {case}"
        # which concerns zips alone
        with aligned(8) if case % 2 and TORCH >= (2, 7) else nullcontext():
            report = distributed.save(
                state, target, format="safetensors", shard_nbytes=most, writers=writers, timeout=30
            )
        assert report.container == "safetensors"
        if rank == 0:  # the others need not import what only compares
            from huggingface_hub import split_torch_state_dict_into_shards
            from safetensors.torch import save

            parts = split_torch_state_dict_into_shards(whole, max_shard_size=most)
            names = set(parts.filename_to_tensors) or {"model.safetensors"}
            index = target / "model.safetensors.index.json"
            assert {path.name for path in target.iterdir()} - {index.name} == names, case
            for name in names:
                keys = parts.filename_to_tensors.get(name, [])
                tensors = {key: whole[key].contiguous() for key in keys}
                wanted = save(tensors, {"format": "pt"})
                assert (target / name).read_bytes() == wanted, (case, name)
            assert index.exists() is (len(names) > 1)
            if len(names) > 1:
                several += 1
                assert json.loads(index.read_text())["weight_map"] == parts.tensor_to_filename
        into = {key: torch.zeros_like(tensor) for key, tensor in state.items() if key != "tied"}
        distributed.load(target, into, timeout=30)
        for key, tensor in into.items():
            assert torch.equal(_local(tensor), _local(state[key])), (case, key)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(target)
        dist.barrier()
    if rank == 0:
        print(several)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.reshape(-1).view(torch.uint8) if local.numel() else local


if __name__ == "__main__":
    main()
