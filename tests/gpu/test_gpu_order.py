"""Order between the program's streams and the copies of a save or load, with kernels that are slow.

`nox -s gpu` runs this file under compute-sanitizer, too, where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu import DEVICE, need_gpu

import fastserial
from fastserial.engines.gds.memory import missing

need_gpu()

pytestmark = pytest.mark.filterwarnings("ignore:transfer ")  # a folder that cuFile does not serve

COUNT = 8 << 20  # elements; 32 MB
SLOW = 200_000_000  # cycles: a tenth of a second
OPTIONS: dict[str, Any] = {"small_file": 0, "durable": False, "block_size": 1 << 20}


@pytest.fixture(autouse=True, params=["cpu_async_gpu", "gds", "gpu_async", "gpu_batch"])
def _installed(request: pytest.FixtureRequest) -> Iterator[None]:
    why = missing(request.param)
    if why is not None:
        pytest.skip(f"needs cuFile: {why}")
    fastserial.install(**OPTIONS, transfer=request.param)
    yield
    fastserial.uninstall()


@pytest.fixture(params=[False, True], ids=["default_stream", "own_stream"])
def stream(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test on the default stream, and on one that nothing orders after it."""
    if request.param:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    else:
        yield
    torch.cuda.synchronize()


def slowly(fill: torch.Tensor, value: float) -> None:
    """Queue a kernel that writes the tensor a while from now."""
    torch.cuda._sleep(SLOW)
    fill.fill_(value)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_save_of_what_a_kernel_still_writes(tmp_path: Path, zipped: bool) -> None:
    for value in (1.0, 2.0):
        tensor = torch.zeros(COUNT, device=DEVICE)
        slowly(tensor, value)
        torch.save({"a": tensor}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        tensor.zero_()  # at once after the save: what is written is not touched by it
        loaded = torch.load(tmp_path / "a.pt", map_location="cpu")["a"]
        assert bool((loaded == value).all())


@pytest.mark.usefixtures("stream")
def test_load_where_kernels_wrote_a_moment_ago(tmp_path: Path) -> None:
    """The allocator hands out memory that a queued kernel of this stream is still to write."""
    wanted = torch.arange(COUNT, dtype=torch.float32)
    torch.save({"a": wanted}, tmp_path / "a.pt")
    for _ in range(3):
        before = torch.empty(COUNT, device=DEVICE)
        slowly(before, -1.0)
        del before
        loaded = torch.load(tmp_path / "a.pt", map_location=DEVICE)["a"]
        doubled = loaded * 2  # on whatever stream comes next, without a wait
        torch.cuda.synchronize()
        assert torch.equal(loaded.cpu(), wanted)
        assert torch.equal(doubled.cpu(), wanted * 2)


@pytest.mark.usefixtures("stream")
def test_load_is_there_for_every_stream(tmp_path: Path) -> None:
    """As after stock's load: another stream may use it without an event."""
    wanted = torch.arange(COUNT, dtype=torch.float32)
    torch.save({"a": wanted}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", map_location=DEVICE)["a"]
    with torch.cuda.stream(torch.cuda.Stream()):
        copy = loaded.clone()
    torch.cuda.synchronize()
    assert torch.equal(copy.cpu(), wanted)


@pytest.mark.usefixtures("stream")
def test_load_into_what_a_kernel_still_writes(tmp_path: Path) -> None:
    wanted = torch.arange(COUNT, dtype=torch.float32)
    torch.save({"a": wanted}, tmp_path / "a.pt")
    target = {"a": torch.empty(COUNT, device=DEVICE)}
    slowly(target["a"], -1.0)
    fastserial.load_into(target, tmp_path / "a.pt")
    torch.cuda.synchronize()
    assert torch.equal(target["a"].cpu(), wanted)


def test_a_save_waits_for_its_own_streams_only(tmp_path: Path) -> None:
    """Another stream may be busy for long: no wait is for the whole device."""
    tensor = torch.ones(COUNT, device=DEVICE)
    torch.save({"a": tensor}, tmp_path / "a.pt")  # to allocate memory, pinned too, is to wait
    torch.cuda.synchronize()
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        for _ in range(50):
            torch.cuda._sleep(SLOW)
    torch.save({"a": tensor}, tmp_path / "a.pt")
    assert not busy.query(), "the save took as long as the kernels of the other stream"
    busy.synchronize()


def test_save_beside_training(tmp_path: Path) -> None:
    """What steps change after the call is not in the file."""
    state = {"a": torch.ones(COUNT, device=DEVICE)}
    pending = fastserial.save_async(state, tmp_path / "a.pt")
    with torch.no_grad():
        state["a"].add_(1)
    pending.wait()
    loaded = torch.load(tmp_path / "a.pt", map_location="cpu")["a"]
    assert bool((loaded == 1).all())
