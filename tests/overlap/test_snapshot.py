"""What is read in place: changes are noticed, and optimizer steps wait or copy what is left."""

from __future__ import annotations

import contextvars
import hashlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.beside import Gate
from test_pending import bytes_of

import fastserial
from fastserial.errors import StorageChangedError
from fastserial.overlap import snapshot
from fastserial.overlap.threads_at import wait_until_on

MODES = ("foreach", "fused", "single")


def save(state: Any, folder: Path, budget: int | None = None) -> fastserial.PendingSave:
    return fastserial.save_async(
        state, folder / "state.pt", snapshot="in_place", snapshot_budget=budget
    )


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "a view": lambda t: t[5:9].zero_(),
    "detached": lambda t: t.detach().mul_(2),
    "foreach": lambda t: torch._foreach_add_([t], 1),
    "out": lambda t: torch.zeros(len(t), out=t),
    "index": lambda t: t.__setitem__(3, 0.5),
    "resize_": lambda t: t.resize_(200_000),
    "storage": lambda t: t.untyped_storage().resize_(800_000),
    "freed": lambda t: t.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_an_error_and_the_old_file_stays(
    tmp_path: Path, state: Any, gate: Gate, name: str
) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")
    saving = save(state, tmp_path)
    assert gate.stopped.wait(60)
    CHANGES[name](state["weights"][-1])
    gate.open.set()
    with pytest.raises(fastserial.TornSnapshotError, match=r"state\.pt") as caught:
        saving.wait()
    assert caught.value.path == str(path)
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.pt"]


def test_in_inference_mode_changes_are_seen(tmp_path: Path, state: Any, gate: Gate) -> None:
    saving = save(state, tmp_path)
    with torch.inference_mode():
        state["weights"][1].add_(1)
    gate.open.set()
    assert isinstance(saving.exception(), fastserial.TornSnapshotError)


COPIED: dict[str, Callable[[], torch.Tensor]] = {
    "numpy's": lambda: torch.from_numpy(np.ones(50_000)),
    "shared": lambda: torch.ones(50_000).share_memory_(),
    "inference": lambda: _inference(),
    "small": lambda: torch.ones(100),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(50_000)


@pytest.mark.parametrize("name", COPIED)
def test_what_cannot_be_watched_is_copied(tmp_path: Path, gate: Gate, name: str) -> None:
    tensor = COPIED[name]()
    obj = [torch.zeros(100_000), tensor]
    expected = bytes_of(obj, tmp_path)
    saving = save(obj, tmp_path)
    with torch.inference_mode():
        tensor.add_(1)
    gate.open.set()
    report = saving.wait()
    assert report.snapshot is not None
    assert report.snapshot.copied == tensor.nbytes
    assert (tmp_path / "state.pt").read_bytes() == expected


def test_what_is_neither_watched_nor_within_the_budget_is_written_at_once(
    tmp_path: Path, gate: Gate
) -> None:
    gate.open.set()
    tensor = torch.from_numpy(np.ones(200_000))
    expected = bytes_of(tensor, tmp_path)
    saving = save(tensor, tmp_path, budget=0)
    tensor.zero_()
    saving.wait()
    assert (tmp_path / "state.pt").read_bytes() == expected


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
    assert report.snapshot.copied <= budget


def test_an_interrupted_call_makes_no_torn_file(tmp_path: Path, state: Any, gate: Gate) -> None:
    """It would have written before it returns: nobody waits for that any more."""

    def interrupt() -> None:
        assert gate.stopped.wait(60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def raising(number: int, frame: object) -> None:
        raise InterruptedError

    path = tmp_path / "state.pt"
    path.write_bytes(b"old")
    before = signal.signal(signal.SIGUSR1, raising)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(InterruptedError):
            fastserial.save_async(state, path, snapshot_budget=0)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    for tensor in (*state["weights"], *state["small"]):
        tensor.zero_()
    gate.open.set()
    with pytest.raises(fastserial.TornSnapshotError):
        fastserial.wait_all()
    assert path.read_bytes() == b"old"


def trained(mode: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(3)])
    options = {} if mode == "single" else {mode: True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_copies_what_is_left(tmp_path: Path, gate: Gate, mode: str) -> None:
    model, optimizer = trained(mode)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = bytes_of(state, tmp_path)
    saving = save(state, tmp_path)
    assert gate.stopped.wait(60)
    train(model, optimizer)  # the saving thread stands still
    train(model, optimizer)
    gate.open.set()
    report = saving.wait()
    assert (tmp_path / "state.pt").read_bytes() == expected
    assert report.snapshot is not None
    assert report.snapshot.late_copied > 300 * 300 * 4 * 8
    assert report.snapshot.held > 0
    assert not report.snapshot.waited or report.snapshot.late_copied


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [0, 1_000_000])
def test_a_step_waits_for_what_does_not_fit(
    tmp_path: Path, gate: Gate, mode: str, budget: int
) -> None:
    model, optimizer = trained(mode)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = bytes_of(state, tmp_path)
    saving = save(state, tmp_path, budget)
    assert gate.stopped.wait(60)
    taken = saving._snapshot
    assert taken is not None

    def open_then() -> None:
        while not taken.waited:
            time.sleep(0.001)
        gate.open.set()

    threading.Thread(target=open_then, daemon=True).start()
    train(model, optimizer)
    assert gate.open.is_set()
    report = saving.wait()
    assert (tmp_path / "state.pt").read_bytes() == expected
    assert report.snapshot is not None
    assert report.snapshot.waited
    assert report.snapshot.late_copied <= budget
    assert (report.snapshot.late_copied > 0) == (budget > 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_copies_what_is_left(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = trained("foreach")
    step: Any = torch.compile(optimizer.step, backend="eager")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = bytes_of(state, tmp_path)
    saving = save(state, tmp_path)
    assert gate.stopped.wait(60)
    model(torch.randn(3, 300)).sum().backward()
    step()
    gate.open.set()
    assert saving.exception() is None
    assert (tmp_path / "state.pt").read_bytes() == expected


def test_another_optimizer_goes_on(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = trained("foreach")
    other, others_optimizer = trained("foreach")
    saving = save([model.state_dict(), optimizer.state_dict()], tmp_path, budget=0)
    assert gate.stopped.wait(60)
    train(other, others_optimizer)
    assert not gate.open.is_set()
    gate.open.set()
    report = saving.wait()
    assert report.snapshot is not None
    assert report.snapshot.held == 0


def test_wait_snapshot_lets_change_by_hand(tmp_path: Path, state: Any, gate: Gate) -> None:
    expected = bytes_of(state, tmp_path)
    saving = save(state, tmp_path)
    assert gate.stopped.wait(60)
    with pytest.raises(TimeoutError):
        saving.wait_snapshot(0.01)
    saving.wait_snapshot()
    state["weights"][0].zero_()
    gate.open.set()
    saving.wait()
    saving.wait_snapshot()
    assert (tmp_path / "state.pt").read_bytes() == expected


def test_a_failed_save_holds_up_no_step(tmp_path: Path) -> None:
    def fail(threads: int) -> Any:
        raise OSError(5, "no engine")

    model, optimizer = trained("foreach")
    with fastserial.options(engine=fail, small_file=0):
        saving = save([model.state_dict(), optimizer.state_dict()], tmp_path, budget=0)
    train(model, optimizer)
    assert isinstance(saving.exception(), fastserial.WriteError)


def test_a_thread_that_computes_is_waited_for_however_long() -> None:
    """torch counts a change when its operation ends: long after the bytes were read, perhaps."""
    states: list[str] = []

    def compute() -> None:
        states.append("inside")
        hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)  # without the interpreter's lock
        states.append("ended")

    thread = threading.Thread(target=compute)
    thread.start()
    while not states:
        time.sleep(0.001)
    assert thread.ident is not None
    assert thread.native_id is not None
    time.sleep(0.02)  # it has gone on to the operation
    wait_until_on({thread.ident: thread.native_id}, 0.4)
    thread.join(0.5)  # it has come out, and says so; the operation takes longer
    states.append("waited")
    thread.join()
    assert states == ["inside", "ended", "waited"]


def test_a_thread_that_waits_for_something_else_holds_nothing_up(
    tmp_path: Path, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_PATIENCE", 0.1)
    saved = threading.Event()
    with fastserial.options(on_report=lambda report: saved.set(), small_file=0):
        save(state, tmp_path)
        assert saved.wait(60)


def test_a_handler_waits_for_the_save_that_a_step_waits_for(tmp_path: Path, gate: Gate) -> None:
    """As that of a signal before the end, which waits for the checkpoint and leaves."""
    model, optimizer = trained("foreach")
    saving = save({"model": model.state_dict()}, tmp_path, budget=0)
    assert gate.stopped.wait(60)
    taken = saving._snapshot
    assert taken is not None
    reports: list[fastserial.SaveReport] = []

    def handle(*_: object) -> None:
        gate.open.set()
        reports.append(saving.wait(30))

    def interrupt() -> None:
        while not taken.waited:
            time.sleep(0.001)
        time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        train(model, optimizer)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(reports) == 1


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
