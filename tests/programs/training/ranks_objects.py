"""A rank of two with a Checkpointer whose state is unusual. Arguments: folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from torch import nn

import fastserial

LARGE = 520  # a weight has more than 1 MiB: every rank writes a part of it


class Hooked(nn.Linear):
    """A module with a `load_state_dict` and a hook of its own."""

    error: Exception | None = None

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[str] = []
        self.register_load_state_dict_post_hook(lambda module, keys: self.seen.append("hook"))

    def load_state_dict(self, state: Any) -> Any:  # without what torch would pass
        self.seen.append("own")
        if self.error is not None:
            raise self.error
        return super().load_state_dict(state)


class Counting(nn.Linear):
    """A module with a method of its own that a module around it calls."""

    loads = 0

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.loads += 1
        super()._load_from_state_dict(*arguments)


class Loader:
    error: Exception | None = None

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.error is not None:
            raise self.error
        self.position = state["position"]


def state_of(number: int, compiled: bool) -> dict[str, Any]:
    module: Any = nn.Sequential(nn.Linear(LARGE, LARGE), nn.Linear(LARGE, 1, bias=False))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(number)
    optimizer = torch.optim.SGD(module.parameters(), lr=number)
    if compiled:
        module[0] = torch.compile(module[0], backend="eager")
    return {
        "nets": [module, {"loader": Loader(number)}],
        "optimizers": {"first": (optimizer,), "steps": number},
        "values": {"tensor": torch.full((LARGE * LARGE,), float(number)), "seen": [1] * number},
    }


def numbers(state: dict[str, Any]) -> set[float]:
    """Return what all that is restored says."""
    module, others = state["nets"]
    optimizer = state["optimizers"]["first"][0]
    tensors = [one.detach() for one in (*module.parameters(), state["values"]["tensor"])]
    found = {float(value) for tensor in tensors for value in (tensor.min(), tensor.max())}
    found |= {others["loader"].position, optimizer.param_groups[0]["lr"]}
    return found | {state["optimizers"]["steps"], len(state["values"]["seen"])}


def containers(folder: Path, rank: int) -> None:
    """Objects in containers are restored in place; the file is one process's, too."""
    for compiled in (False, True):
        here = folder / f"compiled-{compiled}"
        with fastserial.Checkpointer(here, state_of(3, compiled), timeout=30) as checkpointer:
            checkpointer.save(1)
        state = state_of(5, not compiled)
        module, others = state["nets"]
        tensor, loader = state["values"]["tensor"], others["loader"]
        with fastserial.Checkpointer(here, state, timeout=30) as checkpointer:
            assert checkpointer.resume() == 1
        assert state["nets"][0] is module
        assert state["nets"][1]["loader"] is loader
        assert state["values"]["tensor"] is tensor
        assert numbers(state) == {3}, numbers(state)


def own_code(folder: Path, rank: int) -> None:
    """What loads by itself is called, and what it raises on one rank is no missing file."""
    hooked, around, loader = Hooked(), nn.Sequential(Counting(3, 3)), Loader(1)
    state: dict[str, Any] = {"hooked": hooked, "around": around, "loader": loader}
    with fastserial.Checkpointer(folder, state, timeout=30) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
        assert checkpointer.resume() == 2
        assert hooked.seen == ["own", "hook"], hooked.seen
        assert around[0].loads == 1
        for thing in (loader, hooked):
            thing.error = FileNotFoundError("a shard of the data") if rank == 1 else None
            try:
                step = checkpointer.resume()
            except (FileNotFoundError, fastserial.DistributedError) as error:
                assert "a shard of the data" in str(error)
                if rank == 1 and thing is loader:
                    assert error is loader.error
                else:
                    assert not isinstance(error, FileNotFoundError)
            else:
                raise AssertionError(f"it took step {step}")
            thing.error = None


def main() -> None:
    rank, _ = join()
    torch.set_num_threads(1)
    for case in (containers, own_code):
        case(Path(sys.argv[1]) / case.__name__, rank)
        dist.barrier()
    print("same")


main()
