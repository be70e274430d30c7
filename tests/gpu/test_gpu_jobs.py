"""What jobs do with a GPU: ranks, runs that go on, forks, memory that does not suffice."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes
from support.gpu import DEVICE, need_gpu, steps
from support.identity import stock
from torch import nn

import fastserial
from fastserial.engines.gds.memory import missing

need_gpu()
OPTIONS: dict[str, Any] = {"small_file": 0, "durable": False}


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    fastserial.install(**OPTIONS)
    yield
    fastserial.uninstall()


def run_ranks(name: str, count: int, folder: Path) -> None:
    """Run a program on so many ranks, none of which is forked: a GPU does not outlive a fork."""
    shared = {"WORLD_SIZE": str(count), "FASTSERIAL_TEST_STORE": str(folder / "store")}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0"}
    logs = [folder / f"{rank}.log" for rank in range(count)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            variables = {**shared, "RANK": str(rank)}
            output = {"stdin": None, "stdout": file, "stderr": file}
            words = (processes.program(name), folder)
            started.append(processes.start(*words, variables=variables, **output))
    until = time.monotonic() + 200
    while time.monotonic() < until and any(process.poll() is None for process in started):
        time.sleep(0.1)
    for process in started:
        process.kill()
    codes = [process.wait() for process in started]
    assert codes == [0] * count, "\n".join(log.read_text() for log in logs)


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_that_share_the_gpu(tmp_path: Path, count: int) -> None:
    run_ranks("gpu_ranks", count, tmp_path)


def test_fsdp_over_nccl(tmp_path: Path) -> None:
    run_ranks("gpu_fsdp", torch.cuda.device_count(), tmp_path)


def test_cufile_in_compatibility_mode(tmp_path: Path) -> None:
    """Everything but the way of the bytes is as with GPUDirect Storage."""
    why = missing("gds")
    if why is not None:
        pytest.skip(why)
    found = processes.ask("cufile_compat", tmp_path)
    assert all(found["same"]), found
    refused = [why for _, why in found["taken"] if "(5008)" in why or "(5027)" in why]
    if refused:  # it does not know the file system, or finds no udev
        pytest.skip(f"cuFile refuses files of {tmp_path}, even so: {refused[0]}")
    assert [word for word, _ in found["taken"]] == ["gds"] * 3, found
    assert found["moved"]["write"] > 90_000_000
    assert found["moved"]["read"] > 40_000_000


# -- a run -------------------------------------------------------------------------------------


class Run:
    """A model with dropout, whose numbers come from the GPU's generator."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(300, 900), nn.Dropout(0.3), nn.Linear(900, 300))
        self.model.to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def steps(self, count: int) -> list[float]:
        return steps(self.model, self.optimizer, count, 300)


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Steps are made beside the saves; the numbers of the GPU's generator go on, too."""
    first = Run(1)
    with fastserial.Checkpointer(tmp_path, first.state) as checkpointer:
        for step in (3, 6):
            first.steps(3)
            checkpointer.save(step)
        expected = first.steps(3)
    second = Run(2)
    with fastserial.Checkpointer(tmp_path, second.state) as checkpointer:
        assert checkpointer.resume() == 6
    assert second.steps(3) == expected


# -- odd moments -------------------------------------------------------------------------------


def test_pinned_host_tensors(tmp_path: Path) -> None:
    state = {"pinned": torch.randn(3_000_000).pin_memory(), "there": torch.ones(9, device=DEVICE)}
    torch.save(state, tmp_path / "a.pt")
    ours = (tmp_path / "a.pt").read_bytes()
    with stock():
        torch.save(state, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == ours


def _forked(step: Any) -> str:
    """Run a step in a forked child, and return what it ended with."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are threads
        child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            step()
            text = "fine"
        except BaseException as error:
            text = f"{isinstance(error, RuntimeError) and 'CUDA' in str(error)}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def test_a_forked_child(tmp_path: Path) -> None:
    """It saves and loads what is on the host; with the GPU it fails as stock does."""
    there, here = {"a": torch.ones(3_000_000, device=DEVICE)}, {"a": torch.ones(3_000_000)}
    torch.save(there, tmp_path / "parent.pt")  # pinned memory is kept

    def on_the_host() -> None:  # torch's threads for arithmetic are the parent's
        torch.save(here, tmp_path / "child.pt")
        assert torch.load(tmp_path / "child.pt")["a"][-1].item() == 1

    assert _forked(on_the_host) == "fine"
    ours = _forked(lambda: torch.save(there, tmp_path / "ours.pt"))
    torch.save(there, tmp_path / "parent.pt")
    assert torch.equal(torch.load(tmp_path / "parent.pt")["a"], there["a"])
    with stock():
        stocks = _forked(lambda: torch.save(there, tmp_path / "stock.pt"))
    assert (ours[:5], stocks[:5]) == ("True:", "True:"), (ours, stocks)
    assert not (tmp_path / "ours.pt").exists()


@pytest.fixture
def _full_device() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((400 << 20) / whole)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("_full_device")
def test_too_little_memory_on_the_device(tmp_path: Path) -> None:
    """A load fails as stock's does, and the next one works; a save needs none of it."""
    torch.save({"a": torch.ones(150_000_000)}, tmp_path / "large.pt")
    small = {"a": torch.ones(3_000_000, device=DEVICE)}
    for _ in range(4):  # as many as would use up the pinned memory, if they kept it
        with pytest.raises(torch.OutOfMemoryError):
            torch.load(tmp_path / "large.pt", map_location=DEVICE)
        torch.save(small, tmp_path / "small.pt")
        loaded = torch.load(tmp_path / "small.pt", map_location=DEVICE)
        assert torch.equal(loaded["a"], small["a"])
        report = fastserial.last_load_report()
        assert report is not None
        assert report.transfer == "cpu_async_gpu"
        del loaded
