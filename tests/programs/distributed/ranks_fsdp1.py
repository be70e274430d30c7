"""A rank of two: FSDP1 is saved with a device mesh, and refused without. Argument: a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from fastserial import Checkpointer, ConfigError, distributed

State = dict[str, nn.Module | torch.optim.Optimizer]


def trained(seed: int, sharded: bool = True) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh
    )
    adam = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 7)).sum().backward()
    adam.step()
    return {"m": wrapped, "o": adam}


def whole(state: State, path: Path) -> bytes:
    distributed.save(state, path)
    dist.barrier()
    return path.read_bytes()


def main() -> None:
    folder = Path(sys.argv[1])
    join()
    path = folder / "state.pt"
    with pytest.raises(ConfigError, match=r"0\.weight is a ShardedTensor.*device_mesh"):
        distributed.save(trained(1, sharded=False), path)
    state = trained(2)
    before = whole(state, path)
    with Checkpointer(folder / "steps", state) as checkpoints:
        checkpoints.save(1)
    loaded, resumed = trained(3), trained(4)
    distributed.load(path, loaded)
    with Checkpointer(folder / "steps", resumed) as checkpoints:
        assert checkpoints.resume() == 1
    assert whole(loaded, path) == whole(resumed, path) == before
    distributed.save(state["m"], folder / "hf", format="safetensors", shard_nbytes=100)
    index = json.loads((folder / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == 7 * 5 + 5 + 5 * 3 + 3


main()
