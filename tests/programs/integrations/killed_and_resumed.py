"""An ordinary program, killed and resumed, beside stock: `NAME FOLDER RANKS [CONTROL]`.

Each life is a process of its own, or as many as there are ranks; libraries are imported once.
Stock's saves its state by a blocking torch.save after each step, and nobody kills it. Ours is
killed in a save, then after one, and then trains to its end. In the end the states and the last
checkpoints must be the same, bit for bit. CONTROL breaks the Checkpointer, and they differ.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.lives import Held, Late, canonical, differences, slowly, stock

from fastserial import Checkpointer

STEPS = 9
IN_A_SAVE, AFTER_A_SAVE = 3, 6


def program_of(name: str) -> Any:
    path = Path(__file__).parent / "ordinary" / f"{name}.py"
    spec: Any = importlib.util.spec_from_file_location(f"ordinary_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_stock(program: Any, folder: Path, rank: int) -> None:
    for step in range(1, STEPS + 1):
        program.step(step)
        if rank == 0:
            torch.save(stock(program.state), folder / f"step-{step}.pt")


def with_ours(program: Any, folder: Path, kill: int | None, wait: bool, control: bool) -> None:
    checkpointer = (Late if control else Checkpointer)(folder, program.state)
    start = checkpointer.resume()
    print("start", start, flush=True)
    for step in range(start + 1, STEPS + 1):
        program.step(step)
        checkpointer.save(step)
        if step == kill:
            if wait:
                checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()


def live(module: Any, folder: Path, rank: int, ranks: int, how: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(str(folder / f"store {how}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    seed = 1 if how in ("stock", "first") else 2  # of what is not restored
    torch.manual_seed(seed)
    random.seed(seed)
    program = module.Program()
    if how == "stock":
        with_stock(program, folder / "stock", rank)
    else:
        kill = {"first": IN_A_SAVE, "second": AFTER_A_SAVE}.get(how)
        with slowly(Held()):  # so that the next step comes while the save is written
            with_ours(program, folder / "ours", kill, how == "second", len(sys.argv) > 4)
    end = (canonical(stock(program.state)), torch.get_rng_state().tolist())
    (folder / f"{how}.{rank}").write_bytes(pickle.dumps(end))
    if ranks > 1:
        dist.barrier()


def fork(module: Any, folder: Path, ranks: int, how: str) -> list[int]:
    """Run the processes of a life, and return how they ended."""
    pids = []
    for rank in range(ranks):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(module, folder, rank, ranks, how)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def different(found: Any, expected: Any) -> str:
    return "not the same: " + "; ".join(list(differences(found, expected))[:5])


def main() -> None:
    name, folder, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    module = program_of(name)
    (folder / "stock").mkdir()
    for how, code in (("stock", 0), ("first", -9), ("second", -9), ("last", 0)):
        codes = fork(module, folder, ranks, how)
        there = sorted(path.name for path in (folder / "ours").glob("*"))
        print(how, codes, there, flush=True)
        assert codes == [code] * ranks, codes
    for rank in range(ranks):
        expected, found = (
            pickle.loads((folder / f"{how}.{rank}").read_bytes()) for how in ("stock", "last")
        )
        assert found[0] == expected[0], different(found[0], expected[0])
        assert found[1] == expected[1], "other random generators"
    mine = torch.load(folder / "ours" / f"step-{STEPS:08d}.pt", weights_only=False)
    theirs = torch.load(folder / "stock" / f"step-{STEPS}.pt", weights_only=False)
    mine.pop("checkpointer")
    if ranks == 1:
        found, expected = canonical(mine), canonical(theirs)
        assert found == expected, different(found, expected)
    print("the same")


if __name__ == "__main__":
    main()
