"""Saves with a base: stock's bytes, and what is the same is cloned. tests/faults has real disks."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import changing
from torch.distributed.fsdp import fully_shard

import fastserial
from fastserial import Checkpointer, SaveReport
from fastserial.saving import incremental


@pytest.fixture
def reflinks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A file system with reflinks: what is cloned is copied, and noted."""
    ranges: list[tuple[int, int]] = []

    def clone(fd: int, base: int, offset: int, nbytes: int) -> None:
        assert offset % 4096 == nbytes % 4096 == 0
        assert offset + nbytes <= os.fstat(base).st_size
        os.pwrite(fd, os.pread(base, nbytes, offset), offset)
        ranges.append((offset, nbytes))

    monkeypatch.setattr(incremental, "clone_range", clone)
    return ranges


def save(state: Any, path: Path, base: Path | None, **arguments: Any) -> SaveReport:
    """Save with a base, and check that the file is stock's."""
    report = fastserial.save(state, path, base=base, **arguments)
    assert report is not None
    stocks = path.parent / "stock"
    stocks.mkdir(exist_ok=True)
    legacy = not arguments.get("zip_container", True)
    torch.save(state, stocks / path.name, _use_new_zipfile_serialization=not legacy)
    assert path.read_bytes() == (stocks / path.name).read_bytes()
    assert report.bytes == path.stat().st_size
    return report


def backbone(nbytes: int = 20 << 20) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    frozen = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return {"frozen": frozen, "adapter": torch.zeros(100_000), "step": 0}


def test_where_a_filter_of_system_calls_refuses_preadv2(
    tmp_path: Path, reflinks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python calls it for `preadv`."""

    def refused(*arguments: Any) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    save(backbone(), tmp_path / "a", None)
    monkeypatch.setattr(os, "preadv", refused)
    report = save(backbone(), tmp_path / "b", tmp_path / "a")
    assert report.cloned > 19 << 20
    assert reflinks


@pytest.mark.trials(30, 1000)
def test_random_sequences(
    tmp_path: Path,
    reflinks: list[tuple[int, int]],
    dice: random.Random,
    trials: int,
) -> None:
    cloned = 0
    for _ in range(trials):
        base = None
        options = {
            "small_file": dice.choice([0, 1 << 30]),
            "block_size": dice.choice([4096, 1 << 20]),
        }
        with fastserial.options(durable=False, **options):
            zipped = dice.random() < 0.7
            for number, state in enumerate(changing.states(dice, 6)):
                path = tmp_path / f"{number % 2}.pt"
                cloned += save(state, path, base, zip_container=zipped).cloned
                base = path
    assert cloned == sum(nbytes for _, nbytes in reflinks)
    assert cloned > trials * 1_000_000


def test_most_of_an_adapter_run_is_cloned(tmp_path: Path, reflinks: list[tuple[int, int]]) -> None:
    state, path = backbone(), tmp_path / "x.pt"
    save(state, path, None)
    state["adapter"] += 1
    report = save(state, path, path)  # in its own place
    assert 20 << 20 >= report.cloned > (20 << 20) - 8192
    assert report.fallback is None
    assert "cloned=20" in str(report)
    assert fastserial.verify(path).ok


@pytest.mark.parametrize("at", [5, 8 << 20, (20 << 20) - 1])
@pytest.mark.parametrize("through", ["numpy", "data"])
def test_what_is_changed_behind_the_version_counter_is_seen(
    tmp_path: Path, reflinks: list[tuple[int, int]], through: str, at: int
) -> None:
    state, path = backbone(), tmp_path / "x.pt"
    save(state, path, None)
    frozen = state["frozen"]
    version = frozen._version
    view: Any = frozen.numpy() if through == "numpy" else frozen.data
    view[at] ^= 1
    assert frozen._version == version
    assert save(state, path, path).cloned > 10 << 20


def test_a_base_that_lacks_bytes(tmp_path: Path, reflinks: list[tuple[int, int]]) -> None:
    state, path, base = backbone(), tmp_path / "x.pt", tmp_path / "b.pt"
    save(state, base, None)
    os.truncate(base, 11_000_001)
    assert 0 < save(state, path, base).cloned <= 11_000_001
    base.write_bytes(b"")
    assert save(state, path, base).cloned == 0


@pytest.mark.parametrize("name", ["missing.pt", ".", "pipe"])
def test_what_is_no_base(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    report = save(backbone(100_000), tmp_path / "x.pt", tmp_path / name)
    assert report.cloned == 0
    assert (report.fallback or "").startswith("the base cannot be read") == (name == "missing.pt")


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOSPC])
def test_where_nothing_can_be_cloned_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(incremental, "clone_range", refuse)
    state, path = backbone(), tmp_path / "x.pt"
    save(state, path, None)
    report = save(state, path, path)
    assert report.cloned == 0
    assert report.fallback == f"nothing can be cloned from the base: {os.strerror(error)}"


def test_an_interrupt_in_the_comparison_leaves_the_old_file(
    tmp_path: Path, reflinks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, path = backbone(), tmp_path / "x.pt"
    save(state, path, None)
    before = path.read_bytes()

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(incremental, "clone_range", interrupted)
    state["adapter"] += 1
    with pytest.raises(KeyboardInterrupt):
        fastserial.save(state, path, base=path)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["stock", "x.pt"]


@pytest.mark.parametrize("ranks", [False, True])
def test_a_checkpointer(tmp_path: Path, reflinks: list[tuple[int, int]], ranks: bool) -> None:
    model, head = torch.nn.Linear(1000, 1000).requires_grad_(False), torch.nn.Linear(1000, 10)
    if ranks:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    objects = {"model": model, "head": head}
    try:
        with Checkpointer(tmp_path, objects, keep=1, incremental=True) as checkpointer:
            reports = []
            for step in range(3):
                with torch.no_grad():
                    head.weight += 1
                saving = checkpointer.save(step)
                assert saving is not None
                reports.append(saving.result())
        assert [report.cloned > 3_900_000 for report in reports] == [False, True, True]
        written = sum(part.bytes for part in reports[1].ranks)
        rest = reports[1].bytes - reports[1].cloned - written  # the end of the archive
        assert 0 < rest < 4096 or not ranks
        assert fastserial.verify(tmp_path / "step-00000002.pt").ok
        with torch.no_grad():
            model.weight.zero_()
        with Checkpointer(tmp_path, objects) as checkpointer:
            assert checkpointer.resume() == 2
        assert model.weight.abs().sum() > 0
    finally:
        if ranks:
            dist.destroy_process_group()
