"""The transfer types on a GPU: which one is taken, and how much memory it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu import DEVICE, need_gpu
from support.identity import last_save
from support.limits import peak
from support.loading import last_report

import fastserial
from fastserial.config import PAST_HOST
from fastserial.engines.gds.memory import missing

need_gpu()

MIB = 1 << 20
LARGE = 1 << 30
TAKEN = {
    "auto": "cpu_async_gpu",
    "cpu": "cpu_gpu",
    "cpu_gpu": "cpu_gpu",
    "cpu_async_gpu": "cpu_async_gpu",
    "cpu_cached_gpu": "cpu_cached_gpu",
}


@pytest.fixture(autouse=True)
def _stock_afterwards() -> Iterator[None]:
    yield
    fastserial.uninstall()


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {str(n): torch.randn(n, device=DEVICE) for n in (1, 1000, 5_000_000, 7_000_001)}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("word", TAKEN)
def test_words(tmp_path: Path, word: str, zipped: bool) -> None:
    wanted = state()
    torch.save(wanted, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    stocks = (tmp_path / "a.pt").read_bytes()
    fastserial.install(transfer=word, small_file=0)
    torch.save(wanted, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert (tmp_path / "a.pt").read_bytes() == stocks
    saved = last_save()
    assert (saved.transfer, bool(saved.transfer_why)) == (TAKEN[word], True)
    loaded = torch.load(tmp_path / "a.pt", map_location=DEVICE)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    if zipped:
        assert last_report().transfer == ("cpu" if word == "cpu" else TAKEN[word])


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_memory(tmp_path: Path, zipped: bool) -> None:
    """At most 96 MiB of the host's and 16 MiB of the device's, whatever the size."""
    value = {str(n): torch.ones(LARGE // 32, device=DEVICE) for n in range(8)}  # 1 GiB
    path = tmp_path / "a.pt"
    fastserial.install(durable=False, small_file=0)
    small = {"a": torch.ones(5_000_000, device=DEVICE)}
    torch.save(small, path, _use_new_zipfile_serialization=zipped)
    torch.load(path, map_location=DEVICE)
    fastserial.free_pinned()

    def extra(run: Any, kept: int) -> tuple[int, int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        device = torch.cuda.memory_allocated()
        try:
            host = peak(run)
        except OSError as error:
            pytest.skip(f"needs peaks of memory, which the kernel does not reset: {error}")
        return host, torch.cuda.max_memory_allocated() - device - kept

    def save() -> None:
        torch.save(value, path, _use_new_zipfile_serialization=zipped)

    host, device = extra(save, 0)
    assert host <= 96 * MIB, host
    assert device <= 16 * MIB, device
    if not zipped:  # torch loads it
        return
    host, device = extra(lambda: torch.load(path, map_location=DEVICE), LARGE)
    assert host <= 96 * MIB, host
    assert device <= 16 * MIB, device


@pytest.mark.filterwarnings("ignore:transfer ")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("word", PAST_HOST)
def test_past_the_host(tmp_path: Path, word: str, zipped: bool) -> None:
    """Either way the bytes are stock's. What cuFile does not serve here is told, and why."""
    wanted = state()
    torch.save(wanted, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    stocks = (tmp_path / "a.pt").read_bytes()
    fastserial.install(transfer=word, small_file=0, direct=True)
    for _ in range(2):
        torch.save(wanted, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        assert (tmp_path / "a.pt").read_bytes() == stocks
        loaded = torch.load(tmp_path / "a.pt", map_location=DEVICE)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
        loads = [fastserial.last_load_report()] if zipped else []  # torch loads legacy files
        for told in (fastserial.last_save_report(), *loads):
            assert told is not None
            print(told.transfer, told.transfer_why)  # for docs/guide/gpu.md: pytest -s
            if missing(word) is not None:
                assert told.transfer == "cpu_async_gpu"
            asked = "asked for" if word == "gds" else f"{word} is taken as gds"
            past_the_host = told.transfer_why.startswith(f"{asked}: cuFile")
            assert past_the_host == (told.transfer == "gds")
