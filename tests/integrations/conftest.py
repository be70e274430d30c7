"""Runs of frameworks in processes of their own: `tests/programs/integrations`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.runs import Ran, Run, Unbroken


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program with options, as JSON; `fastserial=True` switches it on from outside."""
    number = 0

    def start(program: str, *, ranks: int = 1, fastserial: bool = False, **options: Any) -> Ran:
        nonlocal number
        number += 1
        losses = tmp_path / f"losses{number}"
        variables = {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "FASTSERIAL": str(int(fastserial)),
        }
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words = json.dumps({**options, "losses": str(losses)})
        flags = launcher if ranks > 1 else []
        ended = processes.run(program, words, flags=flags, code=None, variables=variables)
        found = [
            line
            for one in sorted(losses.parent.glob(f"{losses.name}.*"))
            for line in one.read_text().splitlines()
        ]
        return Ran(ended.code, found, ended.out + ended.err)

    return start


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The losses of a program's stock run without a break, so many, and its folder."""
    known: dict[str, tuple[list[str], Path]] = {}

    def found(run: Run, program: str, count: int, **options: Any) -> tuple[list[str], Path]:
        key = f"{program} {options}"
        if key not in known:
            folder = tmp_path_factory.mktemp("unbroken") / "out"
            ran = run(program, folder=str(folder), **options)
            assert ran.code == 0, ran.output
            assert len(ran.losses) == count
            known[key] = ran.losses, folder
        return known[key]

    return found
