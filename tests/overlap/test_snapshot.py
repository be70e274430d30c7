"""What a save beside the program copies at its call, and what happens if there is no room."""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.beside import Gate
from test_pending import bytes_of

import fastserial
from fastserial.errors import StorageChangedError
from fastserial.overlap import snapshot, staging


@pytest.mark.parametrize("budget", [0, 800_000])
def test_a_copy_beyond_the_budget_is_written_at_once(
    tmp_path: Path, state: Any, gate: Gate, budget: int
) -> None:
    expected = bytes_of(state, tmp_path)
    returned = threading.Event()

    def change() -> None:
        fastserial.save_async(state, tmp_path / "state.pt", snapshot_budget=budget)
        returned.set()
        for tensor in (*state["weights"], *state["small"]):
            tensor.zero_()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(change,))
    thread.start()
    assert gate.stopped.wait(60)
    assert not returned.wait(0.1)
    gate.open.set()
    thread.join(60)
    fastserial.wait_all()
    assert (tmp_path / "state.pt").read_bytes() == expected
    report = fastserial.last_save_report()
    assert report is not None
    assert report.snapshot is not None
    assert report.snapshot.kind == "blocking"
    assert not report.snapshot.copied


def test_an_interrupted_call_makes_no_torn_file(tmp_path: Path, state: Any, gate: Gate) -> None:
    """Without room for copies it writes before it returns."""

    interrupted = threading.Event()

    def interrupt() -> None:
        assert gate.stopped.wait(60)
        while not interrupted.wait(0.1):  # one that comes right before a wait is heard behind it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        time.sleep(0.2)  # the call gives up the save, whose next block comes then
        gate.open.set()

    def raising(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    path = tmp_path / "state.pt"
    path.write_bytes(b"old")
    before = signal.signal(signal.SIGUSR1, raising)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            fastserial.save_async(state, path, snapshot_budget=0)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    for tensor in (*state["weights"], *state["small"]):
        tensor.zero_()
    fastserial.wait_all()
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("nbytes", [4096, 8 << 20])
def test_a_storage_that_shrank_is_not_read_behind_its_end(nbytes: int) -> None:
    storage = torch.ones(nbytes, dtype=torch.uint8).untyped_storage()
    part = snapshot.StoragePart(storage, 0, nbytes)
    storage.resize_(nbytes - 1)
    there = torch.zeros(nbytes, dtype=torch.uint8)
    with pytest.raises(StorageChangedError):
        part.copy_to(there.data_ptr())
    assert not there.any()


def test_what_a_lazy_module_does_not_have_yet(tmp_path: Path) -> None:
    state = {"lazy": torch.nn.LazyLinear(3).state_dict(), "x": torch.ones(3)}
    torch.save(state, tmp_path / "stock.pt")
    fastserial.save_async(state, tmp_path / "state.pt").wait()
    for name in ("stock.pt", "state.pt"):
        found = torch.load(tmp_path / name, weights_only=False)
        assert torch.nn.parameter.is_lazy(found["lazy"]["weight"])
        assert found["x"].sum() == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOCAL_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("MPI_LOCALNRANKS", "4"),
        ("SLURM_STEP_TASKS_PER_NODE", "2,4(x3)"),
        ("SLURM_STEP_TASKS_PER_NODE", "one"),
    ],
)
def test_the_memory_of_a_node_is_divided_by_its_ranks(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the launcher counts them: srun and mpirun do not set torchrun's variable."""
    monkeypatch.setattr(staging, "available_bytes", lambda: 80_000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, value)
    room = staging.Staging()._room(None)
    assert room == (40_000 if value == "one" else 10_000)
