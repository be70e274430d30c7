"""`save_async`: planned and copied by all ranks at the call, written in the background.

The save uses connections of its own (`group`) until its end: the next collective call of fastserial
with the same ranks waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from fastserial.distributed.comm.call import call_of
from fastserial.distributed.comm.group import collective, path_of
from fastserial.distributed.save.session import TIMEOUT, SaveTask, Writers
from fastserial.interrupts import cleanup, finish_after
from fastserial.memory.held_settings import quick_switches
from fastserial.overlap import pending
from fastserial.overlap.asynchronous import check_budget
from fastserial.overlap.pending import PendingSave
from fastserial.overlap.snapshot import Snapshot
from fastserial.overlap.staging import staging
from fastserial.reports import SaveReport, publish_save

if TYPE_CHECKING:
    import torch.distributed as dist


def save_async(
    obj: object,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    snapshot_budget: int | None = None,
    writers: Writers = "all",
    timeout: float = TIMEOUT,
    merge: Literal["union"] | None = None,
) -> PendingSave:
    """Save as `save` does, and return before the file is written. Collective.

        saving = distributed.save_async({"model": model}, "ckpt.pt")  # on every rank
        optimizer.step()
        print(saving.wait())

    The file becomes what `save` would have written at the call, or stays as it was. It is planned
    at the call; the ranks exchange and write their bytes while training continues: what this rank
    writes and sends is copied, and all may be changed as soon as the call returns. A group does one
    such save at a time: the next one, and a load, wait for it.

    Args:
        obj: as `save`. Everything that is no tensor is pickled at the call.
        path: as `save`.
        group: as `save`.
        writers: as `save`.
        merge: as `save`.
        snapshot_budget: bytes of this process that copies may take, of all saves together; by
            default half of the memory that is free, divided by the ranks of the node. If they do
            not fit, the call of this rank returns when the file is written.
        timeout: seconds after which a rank that is not heard from counts as lost.

    Returns:
        A handle. `wait()` returns this rank's report, or raises the error of the save, which is
        the same on all ranks.

    Raises:
        DistributedError: any rank failed, all raise it. Also if the last save to this target
            failed on a rank that did not ask for its outcome.
    """
    return start_save(
        obj,
        path,
        snapshot_budget,
        group=group,
        writers=writers,
        timeout=timeout,
        merge=merge,
        began=perf_counter(),
    )


def start_save(
    obj: object,
    path: str | os.PathLike[str],
    budget: int | None,
    *,
    group: dist.ProcessGroup | None,
    timeout: float,
    began: float,
    writers: Writers = "all",
    merge: Literal["union"] | None = None,
    then: Callable[[], object] | None = None,
    base: str | None = None,
    versions: bool = False,
) -> PendingSave:
    """Start a save; as `save_async`.

    Args:
        began: when the user's call did (`perf_counter`).
        then: called on each rank's saving thread after the commit.
        base: as `distributed.save`.
        versions: see `walk.states`.
    """
    saving: SaveTask | None = None
    handed: list[bool] = []  # the saving thread gives up itself

    try:
        call = call_of("distributed.save_async", path, obj)
        with collective(group, timeout, call) as comm, quick_switches():
            check_budget(budget)
            path = path_of(path, obj, "distributed.save_async(obj, path)")
            target = os.path.realpath(path) if "\0" not in path else path
            pending.admit(target)  # raises if the save before failed, and nobody asked
            saving = SaveTask(comm, path, writers, merge, began, base, versions)
            saving.prepare(obj)
            if group is None:
                staging.ranks_of_node = comm.ranks_of_node
            taken = Snapshot(budget, began)
            saving.freeze(taken)
            comm.reserve()
        with comm.propagate_errors():
            del obj
            work = partial(_write, saving, taken, then)
            save = PendingSave(path, target)
            if taken.kind == "copy":
                if pending.run_in_background(save, work, lambda: handed.append(True)):
                    comm.hand_over()
                    taken.end_call()
                    return save
                handed.clear()
                taken.kind = "blocking"
    except BaseException as error:
        if saving is not None and not handed:
            finish_after(error, saving.comm.release, saving.give_up)
        raise
    with cleanup(comm.release):
        return pending.run_at_once(path, target, work)


def _write(saving: SaveTask, taken: Snapshot, then: Callable[[], object] | None) -> SaveReport:
    """Exchange and write what was planned and taken."""
    comm = saving.comm
    try:
        with comm.propagate_errors():
            report = saving.finish()
    except BaseException as error:
        finish_after(error, saving.give_up)
        raise
    finally:
        taken.end()
        comm.release()
    if then is not None:
        then()
    report = replace(report, snapshot=taken.report())
    publish_save(report, saving.config.on_report, direct=saving.config.direct)
    return report
