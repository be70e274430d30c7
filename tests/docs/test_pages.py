"""Every block of the documentation that claims to run runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.blocks import RUN, blocks_of
from support.processes import run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BEFORE = Path(__file__).parent / "before"
RANKS = {"dcp": 2, "distributed": 2}  # pages whose code is that of one rank of several


def _with_code() -> list[Path]:
    return [page for page in PAGES if any(block.runs for block in blocks_of(page))]


@pytest.mark.parametrize("page", _with_code(), ids=lambda page: page.stem)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    flags: list[str] = []
    if page.stem in RANKS:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        flags = [*torchrun, f"--nproc-per-node={RANKS[page.stem]}"]
    before = BEFORE / f"{page.stem.replace('-', '_').lower()}.py"
    words = [page, *([before] if before.exists() else [])]
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    ended = run("docs_page", *words, flags=flags, code=None, cwd=tmp_path, variables=variables)
    print(ended.out)
    assert ended.code == 0, ended.err


def test_what_comes_before_belongs_to_a_page() -> None:
    pages = {page.stem.replace("-", "_").lower() for page in _with_code()}
    assert {before.stem for before in BEFORE.glob("*.py")} <= pages


def test_blocks_say_what_they_are() -> None:
    """A fence without a language is neither run nor known not to be."""
    known = {*RUN, "text", "yaml", "toml"}
    odd = [
        f"{page.name}:{block.line}: {block.language or 'no language'}"
        for page in PAGES
        for block in blocks_of(page)
        if block.language not in known
    ]
    assert not odd, "\n".join(odd)
