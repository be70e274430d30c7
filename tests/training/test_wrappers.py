"""Modules in wrappers, in any order: the names in the file are those of the modules inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fastserial import Checkpointer


class Versioned(nn.Linear):
    """Converts a file of its first version, in which weights were ten times as large."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, versions: Any, *rest: Any) -> None:
        if versions.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 10
        super()._load_from_state_dict(state, prefix, versions, *rest)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def checkpointed(module: nn.Module) -> Any:
    return checkpoint_wrapper(module)


ORDERS: dict[str, list[Callable[[nn.Module], Any]]] = {
    "plain": [],
    "compile": [compiled],
    "checkpoint": [checkpointed],
    "compile(checkpoint)": [checkpointed, compiled],
    "checkpoint(compile)": [compiled, checkpointed],
    "checkpoint(checkpoint(compile))": [compiled, checkpointed, checkpointed],
}


def model(order: str, outside: str) -> Any:
    def wrapped(module: nn.Module, order: str) -> Any:
        for wrap in ORDERS[order]:
            module = wrap(module)
        return module

    inside = nn.Sequential(wrapped(Versioned(2, 2), order), wrapped(nn.BatchNorm1d(2), order))
    return wrapped(nn.Sequential(nn.Linear(2, 2), wrapped(inside, order)), outside)


@pytest.mark.parametrize("outside", ["plain", "checkpoint(compile)", "compile(checkpoint)"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_run_resumes_with_other_wrappers(order: str, outside: str, tmp_path: Path) -> None:
    names = list(model("plain", "plain").state_dict())
    saved = model(order, outside)
    with Checkpointer(tmp_path, {"model": saved}) as checkpointer:
        checkpointer.save(1)
    found = torch.load(tmp_path / "step-00000001.pt")["model"]
    assert list(found) == names
    assert found._metadata["1.0"]["version"] == 2
    for other in ORDERS:
        resumed = model(other, "plain")
        with Checkpointer(tmp_path, {"model": resumed}) as checkpointer:
            assert checkpointer.resume() == 1
        pairs = zip(saved.state_dict().values(), resumed.state_dict().values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
