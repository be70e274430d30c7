"""`Checkpointer`: the one object of a training script that saves, prunes and resumes."""

from __future__ import annotations

import logging
import operator
import os
import signal
import warnings
from collections.abc import Callable, Collection, Mapping
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from fastserial.errors import (
    CheckpointFileError,
    ConfigError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.files.paths import absolute
from fastserial.interrupts import ours
from fastserial.overlap.asynchronous import check_budget
from fastserial.overlap.pending import PendingSave
from fastserial.training.folder import (
    OWN,
    Best,
    CheckpointFolder,
    FolderManager,
    Retention,
    seconds_of,
)
from fastserial.training.mirror import Mirror
from fastserial.training.objects import (
    NameDifference,
    ResumeReport,
    ResumeRequest,
    StateName,
    lacks_of_rank,
    refuse_unrestorable,
    restore,
    state_of,
    states,
)
from fastserial.training.rank_values import generator_states, restore_generators, unpacked
from fastserial.training.single_process import SaveJob, SingleProcess

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


_log = logging.getLogger("fastserial")
_SIGNAL, _DUE = 1, 2  # flags that ranks exchange: a signal came, the time has passed


class Checkpointer:
    """Saves the state of a training run in the background, and resumes from it.

        objects = {"model": model, "optimizer": optimizer}
        with fastserial.Checkpointer("ckpts", objects, every=100, keep=3) as checkpointer:
            first = checkpointer.resume()
            for step in range(first + 1, first + 201):
                optimizer.step()
                checkpointer.save(step)

    Each checkpoint is one ordinary torch file, `step-00000100.pt`, written whole or not at all.
    `save` copies the tensors, and the file is written while training continues.

    In a job of several ranks, each rank creates one and calls the same methods in the same order.
    The ranks write one file together, and resume from the same one.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: Best | None = None,
        keep_for: str | None = None,
        every: int | str | None = None,
        per_rank: Mapping[str, Any] | None = None,
        mirror: str | None = None,
        mirror_bandwidth: float | None = None,
        name: str = "step-{step:08d}.pt",
        on_saved: Callable[[int, str], object] | None = None,
        snapshot_budget: int | None = None,
        incremental: bool = False,
        rng: bool = True,
        weights_only: bool = True,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        merge: Literal["union"] | None = None,
    ) -> None:
        """Connect the ranks; nothing is read or written.

        Args:
            folder: where the files are; the first save creates it. Files with other names are
                ignored. Only one Checkpointer at a time saves in a folder: close the one before.
            state: what is saved, by name: objects (modules, optimizers, schedulers, all that have
                `state_dict` and `load_state_dict`), tensors, plain values, and dictionaries, lists
                and tuples of these. `resume` loads states into the objects, fills tensors in place,
                and replaces values in this mapping and the containers in it. Of several ranks,
                sharded and large tensors are saved as by `distributed.save`; all else is rank 0's.
            keep: the number of newest checkpoints to keep; older ones are removed once a new one is
                in place, unless one of the next three rules keeps them. The last whole one is
                never removed.
            keep_every: also keep the checkpoints of all steps that are multiples of this.
            keep_best: the name of one of the `metrics` of `save`, and "min" or "max": also keep
                the checkpoint with the least or greatest value.
            keep_for: a time ("90s", "10min", "12h", "7d"): also keep those that are not older.
            every: save only at multiples of so many steps, or when so much time ("10min") has
                passed since the last save; None: at each call of `save`.
            per_rank: the values that each rank has of its own, by name, such as data loaders and
                samplers: as `state`, but without large tensors. They are restored only on the same
                number of ranks.
            mirror: URL of a remote folder, such as "s3://bucket/run", to which checkpoints are
                copied in the background once they are in place. The same rules say which stay
                there; a local one stays until it is copied. `resume` takes the newest whole
                checkpoint of both, and `close` waits for the copies.
            mirror_bandwidth: most bytes per second that the copies may take.
            name: of a file.
            on_saved: called on the saving thread with step and path once a checkpoint is in place,
                in the process that manages the folder (rank 0). What it raises is logged.
            snapshot_budget: as `save_async`.
            incremental: what is the same as in the newest checkpoint of the folder, such as a
                frozen model, is not written but cloned, where the file system has reflinks (XFS,
                btrfs). It is compared; each file is whole.
            rng: save and restore each rank's random generators (Python, torch, NumPy, CUDA).
            weights_only: as `torch.load`. Several ranks cannot load other files.
            group: the ranks that save together; by default all, if torch.distributed is in use.
            timeout: seconds without a message after which a rank counts as lost, and for which a
                copy to the mirror that fails is tried again.
            merge: "union": the ranks have different keys, as the stages of a pipeline do; see
                `distributed.save`.

        Raises:
            ConfigError: an argument is impossible, a `state_dict()` is given instead of its object,
                or a tensor is expanded.
            DistributedError: a rank does not connect.
        """
        keep = _whole("keep", keep)
        if keep_every is not None:
            keep_every = _whole("keep_every", keep_every)
        if every is not None and not isinstance(every, str):
            every = _whole("every", every)
        check_budget(snapshot_budget)
        if merge not in (None, "union"):
            raise ConfigError(f'merge must be None or "union", not {merge!r}')
        self._keep = keep
        self._metric = _metric_of(keep_best)
        seconds = None if keep_for is None else seconds_of("keep_for", keep_for)
        retention = Retention(keep, keep_every, keep_best, seconds)
        self._state = state
        self._per_rank = per_rank if per_rank is not None else {}
        _check_state("state", self._state)
        _check_state("per_rank", self._per_rank)
        if both := self._state.keys() & self._per_rank.keys():
            raise ConfigError(f"{', '.join(both)}: in `state` and in `per_rank`: leave out one")
        self._every = every
        self._seconds = seconds_of("every", every) if isinstance(every, str) else None
        self._budget = snapshot_budget
        self._rng = rng
        self._folder = CheckpointFolder(absolute(os.fsdecode(folder)), name)
        self._mirror = (
            Mirror(mirror, self._folder, retention, mirror_bandwidth, timeout) if mirror else None
        )
        self._manager = FolderManager(self._folder, retention, on_saved, self._mirror)
        self._ranks = _ranks_of(state, group, weights_only, timeout, merge)
        self._incremental = incremental
        self._processes = _processes()
        self._prepared = 0  # the process that has the lock: not its forked child
        self._last: PendingSave | None = None
        self._began = perf_counter()  # the start of the last save
        self._step: int | None = None
        self._resumed: ResumeReport | None = None
        self._handlers: dict[int, Any] = {}
        self._pid = 0  # of the process that the handlers are for
        self._came: set[int] = set()  # signals that no checkpoint has followed yet
        self._answered = False  # the last call of `save` made a checkpoint for a signal

    def __repr__(self) -> str:
        every = "" if self._every is None else f", every={self._every}"
        names = ", ".join(map(str, [*self._state, *self._per_rank]))
        return f"<Checkpointer {self._folder.path!r}: {names}; keep={self._keep}{every}>"

    @property
    def step(self) -> int | None:
        """The step of the last checkpoint that was saved or resumed from; None if there is none."""
        return self._step

    @property
    def resumed(self) -> ResumeReport | None:
        """What the last `resume` did; None before it."""
        return self._resumed

    # -- saving --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        force: bool = False,
        metrics: Mapping[str, float | torch.Tensor] | None = None,
    ) -> PendingSave | None:
        """Start a checkpoint of this step, or return None if `every` does not ask for one.

        Waits for the previous checkpoint if that is still being written. After a signal it saves
        regardless of `every`, and waits for the file.

        Args:
            step: a whole number, not negative.
            force: save regardless of `every`, as after the last step. The same on all ranks.
            metrics: numbers for the file, such as the validation loss; see `keep_best`. Of several
                ranks, rank 0's are used.

        Raises:
            ConfigError: another Checkpointer or process saves in this folder, or `metrics` lack
                the name in `keep_best`.
            Exception: the previous checkpoint failed, or this one cannot be started.
        """
        began = perf_counter()
        step = operator.index(step)  # NumPy's and torch's, too: the file holds Python's
        if step < 0:
            raise ConfigError(f"a step must not be negative, not {step}")
        asked = self._is_its_turn(step, force, began)
        if asked is None:
            return None
        self.wait()
        if self._prepared != os.getpid():
            self._prepare()
            self._on_main(lambda _: self._manager.warn_of_later(step))
            self._prepared = os.getpid()
        self._last = save = self._ranks.start(self._job(step, metrics, began))
        self._began, self._step = began, step
        if asked:
            self.wait()
            self._came.clear()
            self._answered = True
        return save

    def _is_its_turn(self, step: int, force: bool, now: float) -> bool | None:
        """Return whether a signal asks for a checkpoint; None if none is to be made now."""
        flags = _SIGNAL if self._came else 0
        if self._seconds is not None and now - self._began >= self._seconds:
            flags |= _DUE
        if self._handlers or self._seconds is not None:
            flags = self._ranks.asked(flags)
        self._answered = False
        if self._every is None:
            its_turn = True
        elif isinstance(self._every, str):
            its_turn = bool(flags & _DUE)
        else:
            its_turn = step % self._every == 0
        asked = bool(flags & _SIGNAL and self._handlers)
        return asked if asked or force or its_turn else None

    def _job(
        self, step: int, metrics: Mapping[str, float | torch.Tensor] | None, began: float
    ) -> SaveJob:
        own: dict[str, Any] = {"version": 1, "step": step}
        # the thread must not keep this object
        manager, is_main = self._manager, self._ranks.is_main

        def base() -> str | None:
            newest = self._folder.steps()[:1] if self._incremental else []
            return self._folder.file(newest[0]) if newest else None

        def of_rank() -> dict[str, Any]:
            if metrics is not None:
                if self._metric is not None and self._metric not in metrics:
                    raise ConfigError(f"metrics lack {self._metric!r}, which keep_best names")
                own["metrics"] = {name: float(value) for name, value in metrics.items()}
            mine = {"rng": generator_states()} if self._rng else {}
            return {**mine, **states(self._per_rank, state_of)}

        return SaveJob(
            self._state,
            of_rank,
            own,
            self._folder.file(step),
            self._budget,
            base,
            lambda: manager.written(step, own.get("metrics", {}), is_main),
            began,
        )

    def _prepare(self) -> None:
        if self._processes == 1 < _processes():
            raise ConfigError(
                f"{self._folder.path}: this Checkpointer was made before init_process_group(), so "
                "that each rank would save its own state to the same files. Make it after that"
            )
        self._ranks.prepare(self._folder)

    def wait(self) -> None:
        """Wait until the checkpoint that was started last is in place.

        Raises:
            Exception: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def save_on(self, *signals: int) -> None:
        """Make a checkpoint after one of these signals: the next `save` makes it, and waits for it.

        `stop_requested` is true after that, so that the loop can end. Previous handlers are called,
        too, and a second Ctrl-C interrupts. Of several ranks, one that gets a signal is enough: all
        call this, and `save` after each step, in which they exchange their flags about once a
        second.
        Call it in the main thread.
        """
        self._pid = os.getpid()
        for number in signals:
            before = signal.signal(number, self._ask)
            self._handlers.setdefault(number, before)

    @property
    def stop_requested(self) -> bool:
        """Whether the last `save` made a checkpoint because of a signal.

        The checkpoint is in place, so a loop that ends loses nothing. The same on all ranks, until
        the next `save`.
        """
        return self._answered

    def _ask(self, number: int, frame: FrameType | None) -> None:
        before = self._handlers.get(number)
        if os.getpid() != self._pid:  # a forked child has inherited the handler
            _handle(before, number, frame)
            return
        again = number in self._came or self._answered
        self._came.add(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        elif number == signal.SIGINT and again and before != signal.SIG_IGN:
            signal.default_int_handler(number, frame)

    # -- resuming ------------------------------------------------------------------------------

    def resume(
        self,
        step: int | None = None,
        *,
        only: Collection[str] | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> int:
        """Restore the newest whole checkpoint and return its step; 0 if there is none.

        The newest is the one of the highest step. Damaged ones are skipped, with a warning that
        names them. The result is also 0 for a checkpoint of step 0: `step` is None if there is
        none. `resumed` says what was restored.

            checkpointer.resume(only=["model"], strict=False, rename={"model.body": "model.core"})
            checkpointer.resumed.missing_keys  # ("model.head.weight",): as it was

        Args:
            step: restore the checkpoint of this step only.
            only: names of `state` and `per_rank`: nothing else is restored, no random generators.
            strict: False: what the checkpoint lacks stays unchanged, single keys of modules, too.
            rename: prefixes of names in the file, and the prefixes here. A name is that of an
                entry, or of a key in it (`model.encoder.0.weight`).

        Raises:
            FileNotFoundError: there is none of that step.
            DistributedError: some ranks see checkpoints, but no checkpoint is seen by all.
            CorruptCheckpointError: it is damaged, or one is and none is whole.
            UnreadableCheckpointError: it was not written by a Checkpointer, or none of them was.
            LoadMismatchError: it is a checkpoint of other objects, or of another number of ranks
                and there are `per_rank` entries.
            ConfigError: `only` has an unknown name.
            Exception: of the user's own `load_state_dict`, unchanged.
        """
        self.wait()
        wanted = self._request(only, strict, rename or {})
        self._resumed = ResumeReport()
        self._on_main(lambda alive: self._manager.get_ready(step, alive))
        if step is not None:
            self._restore(step, wanted, *self._read_or_fetch(step, wanted))
            self._on_main(lambda _: self._manager.warn_of_later(step))
            return step
        refused: CheckpointFileError | None = None
        tried: set[int] = set()
        while there := [one for one in self._ranks.steps(self._folder) if one not in tried]:
            candidate = there[0]
            tried.add(candidate)
            try:
                found = self._read_or_fetch(candidate, wanted)
            except ours(FileNotFoundError) as error:
                try:
                    self._on_main(lambda _: os.stat(self._folder.file(candidate)))  # noqa: B023
                except ours(FileNotFoundError):
                    continue
                raise error from None  # by code of the user's: the file is there
            except ours(CheckpointFileError) as error:
                self._manager.damaged.add(candidate)
                other = isinstance(error, UnreadableCheckpointError)
                refused = error if refused is None or not other else refused
                what = "is no checkpoint of a Checkpointer" if other else "is damaged"
                text = f"{self._folder.file(candidate)} {what}; the one before is used: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                self._on_main(lambda alive: self._manager.fetch_newest(alive, tried))
                continue
            self._restore(candidate, wanted, *found)
            return candidate
        if refused is not None:
            other = isinstance(refused, UnreadableCheckpointError)
            kind = UnreadableCheckpointError if other else CorruptCheckpointError
            raise kind(
                "every checkpoint there is damaged, or is none; move them away to start anew",
                path=self._folder.path,
            )
        return 0

    def _on_main(self, work: Callable[[Callable[[], object]], object]) -> None:
        """Call a function in the process that manages the folder; its error is raised on all.

        Args:
            work: gets a function to call now and then, if it may take long.
        """
        with self._ranks.propagate_errors() as ranks:

            def decision(_: list[Any]) -> None:
                work(ranks.heartbeat)

            ranks.decide_on_root(
                None, decision
            )  # the others wait for the answer as long as it is alive

    def _request(
        self, only: Collection[str] | None, strict: bool, rename: Mapping[str, str]
    ) -> ResumeRequest:
        if isinstance(only, str):
            raise ConfigError(f"only must be a list of names, not {only!r}")
        if unknown := [one for one in only or () if one not in {*self._state, *self._per_rank}]:
            raise ConfigError(f"only: {', '.join(unknown)}: neither in `state` nor in `per_rank`")
        return ResumeRequest(self._state, self._per_rank, only, strict, rename)

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint that is not truncated; None if there is none."""
        return self._manager.latest()

    def _read_or_fetch(
        self, step: int, wanted: ResumeRequest
    ) -> tuple[dict[str, Any], NameDifference]:
        """Read a checkpoint; if it is damaged, that of the mirror in its place."""
        path = self._folder.file(step)
        try:
            return self._ranks.read(wanted, path)
        except ours(CorruptCheckpointError):
            if self._mirror is None:
                raise
            self._on_main(lambda alive: self._manager.fetch(step, alive))
        return self._ranks.read(wanted, path)

    def _restore(
        self, step: int, wanted: ResumeRequest, found: dict[str, Any], difference: NameDifference
    ) -> None:
        path = self._folder.file(step)
        each = [name for name in self._per_rank if wanted.wants(name)]
        rng = self._rng and wanted.only is None
        with self._ranks.propagate_errors():
            mine = self._of_this_rank(found.pop(OWN), path, rng) if each or rng else {}
            lacking = [name for name in each if name not in mine]
            if lacking and wanted.strict:
                raise lacks_of_rank(path, lacking)
        self._ranks.restore(wanted, found, path)
        with self._ranks.propagate_errors():
            restore(self._per_rank, mine, path, wanted.only, wanted.strict)
        if rng and "rng" in mine:
            restore_generators(mine["rng"])
        missing = [*difference.missing, *map(StateName, lacking)]
        self._step = step
        self._resumed = ResumeReport(
            step, path, tuple(map(str, missing)), tuple(map(str, difference.unused))
        )

    def _of_this_rank(self, own: Mapping[str, Any], path: str, rng: bool) -> dict[str, Any]:
        """Return this rank's values; from another number of ranks, only the generators."""
        rows: Any = own.get("ranks")
        if rows is None:
            return {}
        same = len(rows) == self._ranks.count
        if not same and rng:
            text = (
                f"{path} is a checkpoint of {len(rows)} ranks, there are {self._ranks.count}: "
                "random numbers will differ from those of an uninterrupted run"
            )
            warnings.warn(text, UserWarning, stacklevel=4)  # of `resume`
        if self._ranks.rank >= len(rows):
            return {}
        data = rows[self._ranks.rank].numpy().tobytes()
        found: dict[str, Any] = unpacked(data, weights_only=self._ranks.weights_only)
        return {name: one for name, one in found.items() if same or name == "rng"}

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the last checkpoint, restore signal handlers, unlock the folder. Idempotent.

        Raises:
            Exception: the last checkpoint failed.
        """
        handlers, self._handlers = self._handlers, {}
        for number, before in handlers.items():
            if signal.getsignal(number) == self._ask:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        try:
            self.wait()
            if self._mirror is not None:
                self._mirror.close()
        finally:
            self._folder.unlock()
            self._prepared = 0

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except ours(Exception) as another:
            if error is None:
                raise
            _log.error(
                "the last checkpoint was not saved: %s", another
            )  # the first error is raised


def _check_state(name: str, state: object) -> None:
    """Check that a mapping can be saved and restored.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{name} must be a dictionary of what is saved, by name, such as "
            f'{{"model": model, "optimizer": optimizer}}, not {type(state).__name__}'
        )
    for taken in (OWN, "rng"):
        if taken in state and (taken == OWN or name == "per_rank"):
            raise ConfigError(f"the name {taken!r} in `{name}` is taken; use another")
    refuse_unrestorable(state)


def _metric_of(best: Any) -> str | None:
    if best is None:
        return None
    usual = isinstance(best, tuple | list) and len(best) == 2 and best[1] in ("min", "max")
    if not usual:
        raise ConfigError(
            'keep_best must be the name of a metric, and "min" or "max", such as '
            f'("loss", "min"), not {best!r}'
        )
    return str(best[0])


def _whole(name: str, value: object) -> int:
    """Return a positive whole number of any type as an int.

    Raises:
        ConfigError: it is another value.
    """
    whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    number = operator.index(value) if whole else 0  # type: ignore[arg-type]
    if number < 1:
        raise ConfigError(f"{name} must be a whole number, at least 1, not {value!r}")
    return number


def _handle(handler: Any, number: int, frame: FrameType | None) -> None:
    """Treat a signal as a handler, `SIG_IGN` or `SIG_DFL` would."""
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _processes() -> int:
    """Return the number of processes in the default process group; without one, 1."""
    import torch.distributed

    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if grouped else 1


def _ranks_of(
    state: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    weights_only: bool,
    timeout: float,
    merge: Literal["union"] | None,
) -> SingleProcess:
    """Return how this process saves: by itself, or as one rank of a group.

    A single rank counts as a group if it has shards (FSDP): the file must have whole tensors.
    """
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        from fastserial.distributed.comm.call import refuse_unconnected_rank

        refuse_unconnected_rank()
        return SingleProcess(weights_only)
    alone = torch.distributed.get_world_size(group) == 1
    if alone and not weights_only:
        return SingleProcess(weights_only)
    if not weights_only:
        raise ConfigError("several ranks load with weights_only=True only")
    from fastserial.training.many_ranks import ManyRanks, holds_shards

    if alone and not holds_shards(state):
        return SingleProcess(weights_only)
    return ManyRanks(group, timeout, merge)
