"""A save with the table and placeholders of the one before, if what they come from is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastserial import distributed
from fastserial.distributed.save import session as saver


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(local: torch.Tensor, *placements: Any) -> DTensor:
    mesh = dist.init_device_mesh("cpu", (1,) * (len(placements) or 1))
    return DTensor.from_local(local, mesh, placements or [Shard(0)], run_check=False)


def a_state() -> dict[str, Any]:
    whole = torch.arange(30.0)
    return {
        "rows": sharded(torch.arange(12.0).view(3, 4)),
        "other": sharded(torch.arange(12.0).view(3, 4) + 50),
        "plain": whole[:10],
        "view": whole[10:].view(4, 5),
        "module": torch.nn.BatchNorm1d(3),
        "step": 3,
    }


def put(key: str, make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state[key] = make(state)

    return change


def swap(state: dict[str, Any]) -> None:
    state["rows"], state["other"] = state["other"], state["rows"]


def rename(state: dict[str, Any]) -> None:
    state["rowz"] = state.pop("rows")


def data(state: dict[str, Any]) -> None:
    state["plain"].data = torch.ones(7, dtype=torch.int64)


def local(state: dict[str, Any]) -> None:
    state["rows"]._local_tensor = torch.ones(3, 4, dtype=torch.int32)


def resized(state: dict[str, Any]) -> None:
    state["plain"].untyped_storage().resize_(200)


def in_place(state: dict[str, Any]) -> None:
    with torch.no_grad():
        state["plain"].add_(1)
        state["rows"].to_local().mul_(2)


CHANGES: dict[str, tuple[bool, Callable[[dict[str, Any]], Any]]] = {
    "nothing": (True, lambda _: None),
    "values": (True, in_place),
    "a value": (True, put("step", lambda _: 10**9)),
    "an equal tensor": (True, put("rows", lambda s: sharded(s["rows"].to_local().clone() + 1))),
    "two of a kind": (True, swap),
    "a key": (False, rename),
    "the order": (False, lambda s: s.update(plain=s.pop("plain"))),
    "one object twice": (False, put("other", lambda s: s["rows"])),
    "requires_grad": (False, lambda s: s["rows"].requires_grad_()),
    "of a plain one": (False, lambda s: s["view"].requires_grad_()),
    "a parameter": (False, put("plain", lambda s: torch.nn.Parameter(s["plain"]))),
    "a shape": (False, put("rows", lambda _: sharded(torch.zeros(4, 3)))),
    "a dtype": (False, put("rows", lambda _: sharded(torch.zeros(3, 4).half()))),
    "a stride": (False, put("view", lambda s: s["view"].t())),
    "an offset": (False, put("plain", lambda _: torch.arange(30.0)[1:11])),
    "another storage": (False, put("plain", lambda s: s["plain"].clone())),
    "bytes of a storage": (False, resized),
    ".data": (False, data),
    "a placement": (False, put("rows", lambda s: sharded(s["rows"].to_local(), Shard(1)))),
    "a replica": (False, put("rows", lambda s: sharded(s["rows"].to_local(), Replicate()))),
    "a mesh": (False, put("rows", lambda s: sharded(s["rows"].to_local(), Shard(0), Shard(1)))),
    "a local tensor": (False, local),
    "plain, not sharded": (False, put("rows", lambda s: s["rows"].to_local())),
    "a buffer": (False, put("plain", lambda s: s["module"].running_mean)),
}


def stocks(state: dict[str, Any], path: Path) -> bytes:
    """Return the file of stock's, of the whole state."""
    whole = {
        key: dict(one.state_dict()) if isinstance(one, torch.nn.Module) else one
        for key, one in state.items()
    }
    made: dict[int, Any] = {}
    for key, one in whole.items():
        if isinstance(one, DTensor):
            if id(one) not in made:
                full = one.to_local().detach().clone()
                made[id(one)] = full.requires_grad_(one.requires_grad)
            whole[key] = made[id(one)]
    torch.save(whole, path)
    return path.read_bytes()


@pytest.mark.parametrize("name", list(CHANGES))
def test_what_changes_behind_its_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[Any] = []
    make = saver.table_of
    monkeypatch.setattr(saver, "table_of", lambda *args: tables.append(args) or make(*args))
    same, change = CHANGES[name]
    state, path = a_state(), tmp_path / "file.pt"
    (tmp_path / "stock").mkdir()
    for _ in range(2):
        distributed.save(state, path)
        assert path.read_bytes() == stocks(state, tmp_path / "stock" / "file.pt")
    assert len(tables) == 1
    change(state)
    distributed.save(state, path)
    assert path.read_bytes() == stocks(state, tmp_path / "stock" / "file.pt")
    assert len(tables) == (1 if same else 2)
