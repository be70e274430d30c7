"""Every public function and class has an example in its docstring, and the examples run."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fastserial
from fastserial import distributed


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, (BaseException, Warning))


PUBLIC = {
    **{f"fastserial.{name}": getattr(fastserial, name) for name in fastserial.__all__},
    **{f"distributed.{name}": getattr(distributed, name) for name in distributed.__all__},
}
WITH_EXAMPLE = sorted(
    name for name, value in PUBLIC.items() if callable(value) and not _is_error(value)
)


def example_of(docstring: str) -> str:
    """Return the first indented block that no section header such as `Args:` begins."""
    lines = inspect.cleandoc(docstring).split("\n")
    found: list[str] = []
    for before, line in itertools.pairwise(lines):
        if found and line and not line.startswith("    "):
            break
        if found or (line.startswith("    ") and not before.strip()):
            found.append(line)
    return textwrap.dedent("\n".join(found)).strip()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the examples take as given: a model, its state in `ckpt.pt`, one rank."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    state = {"model": model.state_dict(), "step": 1}
    torch.save(state, "ckpt.pt")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        folder = distributed.FastStorageWriter("folder")
        dcp.save({"model": model.state_dict(), "step": 7}, storage_writer=folder)
        yield {
            "torch": torch,
            "dcp": dcp,
            "fastserial": fastserial,
            "distributed": distributed,
            "model": model,
            "optimizer": optimizer,
            "state": state,
        }
    finally:
        dist.destroy_process_group()
        fastserial.uninstall()


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_the_example_of_the_docstring_runs(name: str, names: dict[str, Any]) -> None:
    example = example_of(PUBLIC[name].__doc__ or "")
    assert example, f"{name}: its docstring has no example"
    assert ast.parse(example).body
    fastserial.install()
    exec(compile(example, f"<example of {name}>", "exec"), names)
