"""Training runs that save by DCP beside training, memory, and processes that write for others."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
from support import ranks
from support.told import told

import fastserial

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
MIB = 1 << 20

long_form = pytest.mark.skipif(not FULL, reason="not FASTSERIAL_DISTRIBUTED=full: takes minutes")


def losses(out: str) -> tuple[int, dict[int, str]]:
    """Return after which step a run began, and the loss of each step that it told completely."""
    first, *lines = out[: out.rindex("\n")].split("\n")
    return int(first.split()[1]), {int(line.split()[0]): line for line in lines}


@long_form
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("program", "kills"), [("dcp_train", 12), ("checkpointing_train", 5)])
def test_a_run_that_is_killed_goes_on_as_if_it_were_not(
    program: str, kills: int, tmp_path: Path
) -> None:
    if program == "checkpointing_train":
        pytest.importorskip("torch_checkpointing", reason="torch-checkpointing is not installed")
    flags = tmp_path / "flags"
    flags.write_bytes(bytes(2))
    whole, folder = tmp_path / "unbroken", tmp_path / "broken"
    whole.mkdir()
    folder.mkdir()
    chance = random.Random(program)
    ran: list[list[str]] = []
    hits = last = 0
    for _ in range(kills):
        name = f"step-{last + 3}/.metadata" if program == "dcp_train" else f"{last + 3}"
        job = ranks.Job(program, 2, folder, 100_000, flags)
        killed = job.kill_somewhere(folder / name, chance, 100, within=0.3)
        hits += flags.read_bytes()[killed.victim]
        flags.write_bytes(bytes(2))
        ran.append([end.out for end in killed.ended])
        last = max(step for out in ran[-1] for step in losses(out)[1])
        wait_for_writers(folder)
    expected = [losses(out)[1] for out in ranks.run(program, 2, whole, last + 5, flags)]
    ran.append(ranks.run(program, 2, folder, last + 5, flags))
    starts = []
    for outs in ran:
        for rank, out in enumerate(outs):
            start, found = losses(out)
            starts.append(start)
            assert list(found) == list(range(start + 1, start + 1 + len(found)))
            assert found.items() <= expected[rank].items()
    print(f"{kills} kills, {hits} in a save; began after the steps {starts[::2]} of {last + 5}")
    assert starts == sorted(starts)
    assert starts[::2] == starts[1::2], "the ranks began after different steps"
    assert starts[-1] >= 3 * kills
    assert hits >= kills // 2, "the kills missed the saves"


def wait_for_writers(folder: Path) -> None:
    """Wait for processes that write for one that was killed."""
    until = time.monotonic() + 60
    if not (folder / "told").exists():
        return
    while any(Path(f"/proc/{process}").exists() for process in told(folder / "told")):
        assert time.monotonic() < until, "a writing process stays behind"
        time.sleep(0.05)


@long_form
def test_memory(tmp_path: Path) -> None:
    mib = 512
    for out in ranks.run("dcp_memory", 2, tmp_path / "out", mib):
        peaks = [int(nbytes) // MIB for nbytes in out.split()]
        print(f"more than the {mib * 5 // 4} MiB of the state: {peaks} MiB")
        assert max(peaks) <= 96, peaks


@long_form
@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch before 2.7 has no process that saves"
)
@pytest.mark.parametrize("switched_on", ["1", "0"])
@pytest.mark.parametrize("who", ["ours", "stock"])
def test_a_process_that_saves(
    who: str, switched_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP's own; `FASTSERIAL=1` alone reaches it."""
    monkeypatch.setenv("FASTSERIAL", switched_on)
    here = [out.split() for out in ranks.run("dcp_process", 2, tmp_path / "out", who)]
    processes = told(tmp_path / "out.told")
    assert len(processes) == 2
    assert not processes.keys() & {int(process) for process, _ in here}
    assert set(processes.values()) == {switched_on == "1"}
    assert fastserial.verify(tmp_path / "out").ok
