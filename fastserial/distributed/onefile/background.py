"""`save_async`: planned and copied by all ranks at the call, written in the background.

The save uses connections of its own (`group`) until its end: the next collective call of fastserial
with the same ranks waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch

from fastserial.distributed.onefile.saver import TIMEOUT, SaveTask, Writers
from fastserial.distributed.ranks.group import Traffic, collective, path_of
from fastserial.distributed.sharding.flat_shard import FlatShard
from fastserial.distributed.sharding.pieces import as_dtensor
from fastserial.distributed.state.merging import leaf_of
from fastserial.errors import StorageChangedError, TornSnapshotError
from fastserial.memory.held_settings import quick_switches
from fastserial.overlap import guard, pending
from fastserial.overlap.asynchronous import Kind, check_snapshot
from fastserial.overlap.pending import PendingSave
from fastserial.overlap.snapshot import Snapshot
from fastserial.overlap.watch import Reached, storages_of
from fastserial.reports import SaveReport, publish_save

if TYPE_CHECKING:
    import torch.distributed as dist


def save_async(
    obj: object,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    snapshot: Kind = "copy",
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
    at the call; the ranks exchange and write their bytes while training continues. A group does
    one such save at a time: the next one, and a load, wait for it.

    Args:
        obj: as `save`. Everything that is no tensor is pickled at the call.
        path: as `save`.
        group: as `save`.
        writers: as `save`.
        merge: as `save`.
        snapshot: `copy`: what this rank writes and sends is copied; all may be changed as soon as
            the call returns. `in_place`: what it writes itself is read while the program continues;
            optimizers wait before a step until what they change is taken. Copied are small pieces,
            what travels to other ranks, and DTensors that belong to no optimizer in `obj`.
        snapshot_budget: bytes of this process that copies may take, of all saves together; by
            default half of the memory that is free, divided by the ranks of the node. With `copy`,
            what does not fit is written before the call returns.
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
        snapshot,
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
    kind: Kind,
    budget: int | None,
    *,
    group: dist.ProcessGroup | None,
    timeout: float,
    began: float,
    writers: Writers = "all",
    merge: Literal["union"] | None = None,
    steady: Set[int] | None = None,
    then: Callable[[], object] | None = None,
) -> PendingSave:
    """Start a save; as `save_async`.

    Args:
        began: when the user's call did (`perf_counter`).
        steady: identities of the storages that may be read in place; None: all that are watched.
        then: called on each rank's saving thread after the commit.
    """
    saving: SaveTask | None = None
    try:
        with collective(group, timeout) as traffic, quick_switches():
            check_snapshot(kind, budget)
            path = path_of(path, obj, "distributed.save_async(obj, path)")
            target = os.path.realpath(path) if "\0" not in path else path
            pending.admit(target)  # raises if the save before failed, and nobody asked
            saving = SaveTask(traffic, path, writers, merge, began)
            found, modules = saving.prepare(obj)
            reached = _reached(found.values, modules)
            taken = Snapshot(path, kind, budget, reached, steady, began)
            saving.freeze(taken)
        with traffic.together():
            del found, modules, obj
            work = partial(_write, saving, taken, then)
            save = PendingSave(path, target, taken)
            beside = pending.run_in_background(save, work, taken, traffic.idle.clear)
    except BaseException:
        if saving is not None:
            saving.give_up()
        raise
    if not beside:
        return pending.run_at_once(path, target, work)
    try:
        taken.end_call()
    except BaseException:  # Ctrl-C
        taken.abandon()
        raise
    return save


def size_of(
    obj: object,
    path: str,
    traffic: Traffic,
    merge: Literal["union"] | None = None,
) -> int:
    """Return the bytes of the file that would be written. To be called in a `collective`.

    Args:
        merge: as `save_async`.

    Raises:
        DistributedError: another rank failed, or the ranks' states differ.
        Exception: the state cannot be saved.
    """
    return SaveTask(traffic, path, "all", merge, perf_counter()).measure(obj)


def _reached(values: Iterable[Any], modules: Iterable[Any]) -> Reached:
    """Return what watches the tensors of a state for changes.

    torch counts no changes that `foreach` functions and optimizers make to DTensors. So only those
    are watched that belong to an optimizer: before its step it asks.
    """
    reached = Reached()
    optimizers = [one for one in modules if isinstance(one, torch.optim.Optimizer)]
    owned = {found for one in optimizers for found in guard.storages_of_optimizer(one)}
    for leaf in map(leaf_of, values):
        if isinstance(leaf, FlatShard):
            reached.note(leaf.tensor)
        elif (sharded := as_dtensor(leaf)) is not None:
            storages = set(storages_of(sharded))
            if storages <= owned:
                reached.note(sharded.to_local())
                for storage in storages:
                    reached.watch(storage, sharded)
            else:
                reached.leave(storages)
        elif leaf is not None:
            reached.note(leaf)
    return reached


def _write(saving: SaveTask, taken: Snapshot, then: Callable[[], object] | None) -> SaveReport:
    """Exchange and write what was planned and taken."""
    traffic = saving.traffic
    try:
        with traffic.together():
            try:
                report = saving.finish(taken.verify)
            except StorageChangedError as error:
                raise TornSnapshotError(taken.path) from error
    except BaseException:
        saving.give_up()
        raise
    finally:
        taken.end()
        traffic.idle.set()
    if then is not None:
        then()
    report = replace(report, snapshot=taken.report())
    publish_save(report, saving.config.on_report)
    return report
