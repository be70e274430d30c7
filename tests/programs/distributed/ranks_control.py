"""Ranks whose group is made anew, whose handlers save, or who are only some of the job."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks

import fastserial
from fastserial import distributed
from fastserial.distributed.save.writer import ShardWriter
from fastserial.errors import DistributedError

LARGE = 2**19  # of float32: 2 MiB


def anew(folder: str) -> None:
    """As under torchrun: the store outlives the group, and keeps what it wrote.

    gloo's own addresses in it are those of the group before, unless it connects when it is used.
    """
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port, path = Path(folder, "port"), Path(folder, "new", "x.pt")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, count, True, wait_for_workers=False)
        port.with_suffix(".made").write_text(str(store.port))
        port.with_suffix(".made").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), count, False)
    for group in range(3):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        if group == 0:
            with pytest.raises(DistributedError, match="does not exist"):
                distributed.save({"x": torch.ones(3)}, path, timeout=20)
        else:
            distributed.save({"x": torch.ones(3)}, path, timeout=20)
        Path(folder, f"{group}-{rank}").touch()
        path.parent.mkdir(exist_ok=True)
        while not all(Path(folder, f"{group}-{one}").exists() for one in range(count)):
            time.sleep(0.01)
        dist.destroy_process_group()
    Path(folder, f"ended-{rank}").touch()
    while rank == 0 and not all(Path(folder, f"ended-{one}").exists() for one in range(count)):
        time.sleep(0.01)


def handler(folder: str, control: str = "") -> None:
    """It saves while its rank is in a save: that is refused, and both ranks' saves go well."""
    rank, _ = ranks.join()
    if control:
        from fastserial.distributed.comm.group import RankGroup

        RankGroup.held_for = _unguarded  # type: ignore[method-assign,assignment]
    path, errors = Path(folder, "x.pt"), _errors_of_handler(folder)

    class Value:
        def __reduce__(self) -> tuple[Any, ...]:
            if rank == 0:
                signal.raise_signal(signal.SIGUSR1)  # when rank 0 pickles
            return int, (7,)

    for _ in range(2):
        if control:
            with pytest.raises((DistributedError, AttributeError)):
                distributed.save({"x": torch.ones(3), "n": Value()}, path, timeout=3)
            return
        distributed.save({"x": torch.ones(3), "n": Value()}, path, timeout=30)
        dist.barrier()
        assert torch.load(path, weights_only=False)["n"] == 7
    assert len(errors) == 2 * (rank == 0)
    assert all("in the middle of" in str(error) and "x.pt" in str(error) for error in errors)
    assert not Path(folder, "other.pt").exists()
    fastserial.save({"y": 1}, Path(folder, f"{rank}.pt"))


def _errors_of_handler(folder: str) -> list[DistributedError]:
    """Let a handler of SIGUSR1 save; return the list to which the errors of these saves go."""
    errors: list[DistributedError] = []

    def on_signal(*_: object) -> None:
        try:
            distributed.save({"step": 1}, Path(folder, "other.pt"), timeout=3)
        except DistributedError as error:
            errors.append(error)

    signal.signal(signal.SIGUSR1, on_signal)
    return errors


def _unguarded(self: Any, call: object) -> Any:
    return pytest.MonkeyPatch.context()


def writing_handler(folder: str) -> None:
    """It saves while its rank writes what `save_async` could not copy: that is refused, too."""
    rank, _ = ranks.join()
    path, errors = Path(folder, "x.pt"), _errors_of_handler(folder)
    write = ShardWriter.write

    def interrupted(self: ShardWriter, *given: Any) -> Any:
        if rank == 0 and not errors:
            signal.raise_signal(signal.SIGUSR1)
        return write(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "write", interrupted)
        state = {name: torch.ones(LARGE) for name in "ab"}  # of which each rank writes one
        save = distributed.save_async(state, path, snapshot_budget=0, timeout=30)
        assert save.wait().snapshot.kind == "blocking"
    assert len(errors) == (rank == 0)
    assert all("in the middle of" in str(error) for error in errors)
    distributed.save({"x": torch.ones(3)}, path, timeout=30)
    assert torch.equal(torch.load(path)["x"], torch.ones(3))


def some(folder: str) -> None:
    """Errors and reports name the job's ranks, in a group of the last two of three."""
    rank, _ = ranks.join()
    group: Any = dist.new_group([1, 2])
    if rank:
        _of_two(rank, group, folder)
    dist.barrier()


def _of_two(rank: int, group: Any, folder: str) -> None:
    options: dict[str, Any] = {"group": group, "timeout": 30}
    path = Path(folder, "x.pt")
    report = distributed.save({"x": torch.ones(LARGE)}, path, **options)
    assert report.rank == rank
    if rank == 1:
        assert [line.rank for line in report.ranks] == [1, 2]
    loaded = distributed.load(path, {"x": torch.zeros(LARGE)}, **options)
    assert [line.rank for line in loaded.ranks] == [1, 2]
    cases: list[tuple[Any, str]] = [
        (lambda: distributed.save({"x": torch.full((LARGE,), float(rank))}, path, **options),
         "^rank 2: tensors that should be equal differ between rank 1 and rank 2"),
        (lambda: distributed.save({"x": torch.ones(1 + rank)}, path, **options),
         r"^rank 2: its 'x' is torch.float32 of shape \(3,\), that of rank 1 .*\(2,\)"),
        (lambda: distributed.save({"n": {"a": 1, str(rank): 1}}, path, **options),
         "^rank 2: it has 'n.2', which rank 1 does not have"),
        (lambda: distributed.save({"x": torch.ones(1 + rank)}, path, merge="union", **options),
         "x: ranks 1 and 2 have different tensors"),
        (lambda: distributed.save({}, path.with_name(f"of{rank}"), **options),
         "^rank 2: it called .*of2.* while rank 1 called .*of1"),
        (lambda: distributed.load(path, {"x": torch.zeros(1 + rank)}, **options),
         r"(?s)rank 1.*rank 2"),
    ]  # fmt: skip
    for call, text in cases:
        with pytest.raises(fastserial.FastserialError, match=text):
            call()
    began = time.monotonic()
    if rank == 1:
        with pytest.raises(DistributedError, match=r"^rank 2: (not heard from|its process)"):
            distributed.save({"x": torch.ones(3)}, path, group=group, timeout=2)
        assert time.monotonic() - began < 7
    else:
        time.sleep(4)


SCENES = (anew, handler, writing_handler, some)
name, *words = sys.argv[1:]
{scene.__name__: scene for scene in SCENES}[name](*words)
