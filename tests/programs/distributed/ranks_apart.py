"""A rank of three: calls that go wrong on rank 1 before the ranks have exchanged anything.

Nobody waits for a timeout: all raise, rank 1 the error itself, the others one that names it; and
the next call goes well. Argument: a folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import join
from torch import nn

import fastserial
from fastserial import Checkpointer, ConfigError, DistributedError, distributed
from fastserial.distributed.ranks.group import collective

FOLDER = Path(sys.argv[1])
RANK, COUNT = join()
PATH = FOLDER / "state.pt"
STATE = {"w": torch.arange(300.0), "n": 1}


def refused(call: Callable[[], object], kind: type[BaseException], text: str) -> BaseException:
    """Call on all ranks; return the error, which is of `kind` on rank 1."""
    with pytest.raises(BaseException, match=text) as caught:
        call()
    error = caught.value
    assert isinstance(error, kind if RANK == 1 else DistributedError), error
    if isinstance(error, DistributedError):
        assert error.rank == 1, error
    elif RANK == 1:
        assert type(error) is kind, error
    dist.barrier()
    return error


def options() -> None:
    """Options are resolved where an error of theirs is heard: `ConfigError` on every rank."""
    calls: list[Callable[[], object]] = [
        lambda: distributed.save(STATE, PATH),
        lambda: distributed.save_async(STATE, PATH),
        lambda: distributed.load(PATH, dict(STATE)),
    ]
    if RANK == 1:
        os.environ["FASTSERIAL_BLOCK_SIZE"] = "much"
    for call in calls:
        assert isinstance(refused(call, ConfigError, "BLOCK_SIZE"), ConfigError)
    os.environ.pop("FASTSERIAL_BLOCK_SIZE", None)


def at_once() -> None:
    """The connections are closed as soon as they are made; nobody is connecting still."""

    def failing() -> None:
        with collective(None, 600.0):
            if RANK == 1:
                raise KeyError("at once")

    for _ in range(40):
        refused(failing, KeyError, "at once")


def arguments() -> None:
    merge: Any = "unoin" if RANK == 1 else None
    snapshot: Any = "cpoy" if RANK == 1 else "copy"
    nowhere: Any = None if RANK == 1 else PATH
    refused(lambda: distributed.save(STATE, PATH, merge=merge), ValueError, "unoin")
    refused(lambda: distributed.save_async(STATE, PATH, snapshot=snapshot), ConfigError, "cpoy")
    refused(lambda: distributed.save(STATE, nowhere), TypeError, "NoneType")
    refused(lambda: distributed.load(nowhere, dict(STATE)), TypeError, "NoneType")
    swapped: Any = distributed  # the type checker would see it
    for call in (
        lambda: swapped.save(str(PATH), STATE),
        lambda: swapped.save_async(PATH, STATE),
        lambda: swapped.load(dict(STATE), PATH),
    ):
        with pytest.raises(TypeError, match="swapped"):
            call()
        dist.barrier()


class Stateful:
    """What a user writes: its methods may fail on one rank."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        self.load_state_dict({})
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if RANK == 1 and self.error is not None:
            raise self.error


class Module(nn.Linear):
    """A module whose state is not the parameters' memory alone."""

    error: BaseException | None = None

    def get_extra_state(self) -> str:
        if RANK == 1 and self.error is not None:
            raise self.error
        return "extra"

    def set_extra_state(self, state: str) -> None:
        self.get_extra_state()


def code_of_the_user() -> None:
    module = Module(2, 2)
    path = FOLDER / "module.pt"
    distributed.save({"m": module}, path)
    for error in (KeyError("mine"), FileNotFoundError("mine"), KeyboardInterrupt("mine")):
        module.error = error
        kind = DistributedError if isinstance(error, OSError) else type(error)
        refused(lambda: distributed.save({"m": module}, path), kind, "mine")
        refused(lambda: distributed.save_async({"m": module}, path), kind, "mine")
        refused(lambda: distributed.load(path, {"m": module}), kind, "mine")
    module.error = None
    distributed.load(path, {"m": module})


def checkpointer() -> None:
    mine = Stateful()
    with Checkpointer(FOLDER / "steps", {"mine": mine, "m": nn.Linear(2, 2)}) as checkpoints:
        checkpoints.save(1)
        checkpoints.wait()
        for error in (KeyError("mine"), OSError(5, "mine"), KeyboardInterrupt("mine")):
            mine.error = error
            refused(lambda: checkpoints.save(2), type(error), "mine")
            refused(lambda: checkpoints.resume(), type(error), "mine")
        mine.error = KeyError("mine")
        refused(lambda: checkpoints.check(), KeyError, "mine")
        mine.error = None
        checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.resume() == 2


def not_loadable() -> None:
    """`check()` raises `ConfigError` on all ranks, though only rank 0 looks at the pickle."""
    with (
        Checkpointer(FOLDER / "refused", {"where": Path("a")}) as checkpoints,
        pytest.raises(ConfigError, match="weights_only=True"),
    ):
        checkpoints.check()


def missing_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"rank 0: .*nowhere\.pt"):
        distributed.load(FOLDER / "nowhere.pt", dict(STATE))


def outside_the_group() -> None:
    group = dist.new_group([0, 2])
    if RANK == 1:
        for call in (
            lambda: distributed.save(STATE, PATH, group=group),
            lambda: distributed.load(PATH, dict(STATE), group=group),
        ):
            with pytest.raises(ConfigError, match="rank 1 of the job is not in `group`"):
                call()
    else:
        distributed.save(STATE, PATH, group=group)
        distributed.load(PATH, dict(STATE), group=group)
    dist.barrier()


def main() -> None:
    distributed.save(STATE, PATH)
    for case in (
        *(options, at_once, arguments, code_of_the_user, checkpointer, not_loadable, missing_file),
        outside_the_group,
    ):
        case()
        distributed.save(STATE, PATH)
        distributed.load(PATH, dict(STATE))
        print(case.__name__, flush=True)
    assert fastserial.last_load_report() is not None


main()
