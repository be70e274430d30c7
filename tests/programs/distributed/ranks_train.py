"""A rank that trains: `as_stock FOLDER KIND...`, `unstepped FOLDER ddp|fsdp OPTIMIZER...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import ranks
from support.sharded import parallel
from support.unstepped import Run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fastserial import Checkpointer, distributed, last_save_report


def made(kind: str, count: int) -> nn.Module:
    """Return a model in the way of a kind of parallelism."""
    torch.manual_seed(1)
    width, more = 258 if "large" in kind else 24, {"dropout": 0.0, "batch_first": True}
    blocks = [nn.TransformerEncoderLayer(width, 6, 3 * width, **more) for _ in range(2)]
    head = nn.Linear(width, 101, bias=False)
    model = nn.Sequential(nn.Embedding(101, width), *blocks, head)
    if "tied" in kind:
        head.weight = model[0].weight
    model.register_buffer("seen", torch.zeros(7))
    if kind.startswith("fsdp-tp"):
        mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in blocks:
            plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])
    return parallel(model, kind.split("-")[0], *blocks)


def trimmed(value: Any) -> Any:
    """Return a state without the padding that torch's gather of uneven shards leaves behind."""
    if isinstance(value, torch.Tensor):
        whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
        return value if whole else value.clone()
    if isinstance(value, dict):
        return {key: trimmed(item) for key, item in value.items()}
    return [trimmed(item) for item in value] if isinstance(value, list) else value


def as_stock(place: str, *kinds: str) -> None:
    """Train, save, and compare with stock's gather and save."""
    folder, rank, count = Path(place), dist.get_rank(), dist.get_world_size()
    for kind in kinds:
        model = made(kind, count)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        # Ranks of one tensor-parallel group see the same data, as those of a plain job do.
        seed = {"plain": 0, "fsdp-tp": rank // 2}.get(kind.removesuffix("-large"), rank)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            x = torch.randint(101, (4, 8), generator=generator)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        path = folder / "model.pt"
        for _ in range(2):  # with a new plan, and with the one that was kept
            distributed.save({"model": model, "optimizer": optimizer, "step": 2}, path, timeout=60)
        report = last_save_report()
        assert report is not None
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = {
            "model": get_model_state_dict(model, options=whole),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
            "step": 2,
        }
        state = trimmed(state)
        if rank == 0:
            assert len(report.ranks) == count, report
            assert all(part.phases["sync"] > 0 for part in report.ranks[:1]), report
            stock = folder / "stock" / "model.pt"
            stock.parent.mkdir(exist_ok=True)
            torch.save(state, stock)
            assert path.read_bytes() == stock.read_bytes(), kind
            print(kind)
        dist.barrier()


def unstepped(place: str, kind: str, *names: str) -> None:
    """Save before the first step, and go on."""
    torch.set_num_threads(1)

    def wrap(net: Any) -> Any:
        if kind == "ddp":
            return DistributedDataParallel(net, find_unused_parameters=True)
        return parallel(net, kind)

    for name in names:
        expected = Run(name, wrap).steps(4)
        run = Run(name, wrap)
        path = Path(place, f"{name}.pt")
        distributed.save(run.state, path)
        assert not any(torch.load(path)["optimizer"]["state"].values())
        with Checkpointer(Path(place, name), run.state, rng=False) as checkpointer:
            checkpointer.save(0)
            done = run.steps(2)
            checkpointer.save(2)
        assert done + run.steps(4) == expected, name
        for step in (0, 2):
            again = Run(name, wrap)
            with Checkpointer(Path(place, name), again.state, rng=False) as checkpointer:
                assert checkpointer.resume(step) == step
            assert again.steps(4) == expected[step:], (name, step)
        again = Run(name, wrap)
        distributed.load(path, again.state)
        assert again.steps(4) == expected, name
    dist.barrier()


ranks.main(globals())
