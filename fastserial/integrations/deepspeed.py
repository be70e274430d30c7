"""DeepSpeed's checkpoints through fastserial.

    import fastserial.integrations.deepspeed as fast

    engine, *_ = deepspeed.initialize(...)
    fast.enable(engine)  # save_checkpoint and load_checkpoint unchanged, the same files

or, before `deepspeed.initialize`, by configuration:

    fast.install()  # honours the section "fastserial" of DeepSpeed's config
    deepspeed.initialize(config={..., "fastserial": {"engine": "threads"}})

Files and names are DeepSpeed's; stock DeepSpeed and stock torch read them. The differences: each
file is written whole or not at all, and `latest` names a checkpoint only when the files of all
ranks are durable. If one rank cannot save, all ranks raise and `latest` is unchanged.

`enable(engine, overlap=True)` writes the files while the next forward and backward pass run, and
waits for them before the next optimizer step.

`enable(engine, data_parallel=True)` lets all ranks that hold the same model write its file together
(ZeRO 0 to 2), where stock leaves that to the first of them.

`save_full(engine, path)` writes one ordinary torch file, without DeepSpeed's gather.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups

from fastserial import config, distributed
from fastserial.checkpoints.save import write
from fastserial.console import say
from fastserial.distributed.comm.call import call_of
from fastserial.distributed.comm.group import collective
from fastserial.distributed.save.session import TIMEOUT, Writers
from fastserial.distributed.state.walk import leaves
from fastserial.engines.deepspeed.aio_op import AioSettings
from fastserial.engines.deepspeed.engine import DeepSpeedEngine as AioEngine
from fastserial.errors import ConfigError, FastserialError
from fastserial.files.durable import replace_bytes, sync_folders
from fastserial.integrations.deepspeed_full import save_full, writers_of
from fastserial.interrupts import ours
from fastserial.overlap.asynchronous import start_save
from fastserial.overlap.pending import PendingSave
from fastserial.reports import SaveReport

if TYPE_CHECKING:
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo

__all__ = [
    "CheckpointFailedError",
    "FastserialCheckpointEngine",
    "disable",
    "enable",
    "install",
    "save_full",
    "uninstall",
]

SECTION = "fastserial"
_LATEST = "latest"
_log = logging.getLogger("fastserial")


class CheckpointFailedError(FastserialError, RuntimeError):
    """Another rank could not save its part of a checkpoint; `latest` is unchanged."""


class SharedFile(NamedTuple):
    """Who saves a file together.

    Attributes:
        group: the ranks that hold the same.
        writers: which of them write.
        is_first: this is the rank that writes alone where they cannot.
    """

    group: torch.distributed.ProcessGroup
    writers: Writers
    is_first: bool


class FastserialCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # no annotations there
    """Saves through fastserial, and fails on all ranks or on none.

    An error in `save` is kept until `commit`, where the ranks exchange their errors: a rank that
    raised at once would leave the others waiting.

    With `overlap`, `save` returns early, and `commit` waits for the files. DeepSpeed calls `commit`
    before the next optimizer step; other calls that write or read a checkpoint call it first.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        zip_container: bool = True,
        overlap: bool = False,
        data_parallel: bool = False,
    ) -> None:
        """Make an engine.

        Args:
            options: as in `fastserial.Config`.
            zip_container: torch's zip format; False is the legacy one.
            overlap: write copies during training (`save_async`).
            data_parallel: all ranks of a data-parallel group write its model's file.

        Raises:
            ConfigError: an option has an unknown name or an impossible value.
        """
        super().__init__()
        config.current(**options)
        self.name = type(self).__name__
        self.options = dict(options)
        self.zip_container = zip_container
        self.overlap = overlap
        self.data_parallel = data_parallel
        self.shared: SharedFile | None = None  # while a file of several ranks is saved
        self.info: CheckpointCommitInfo | None = None
        self._uncommitted = False
        self._saves: list[PendingSave] = []
        self._folders: set[str] = set()
        self._failure: BaseException | None = None
        _engines.add(self)

    def is_decoupled(self) -> bool:
        """Return whether DeepSpeed calls `commit` only before the next optimizer step."""
        return self.overlap

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """Return what is not committed yet."""
        return self.info if self._uncommitted else None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Start a checkpoint, once the previous one is committed."""
        self.conclude()
        self.info = info
        self._uncommitted = True
        self._failure = None
        self._folders = {os.path.abspath(info.save_dir)}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder, whose entry `commit` makes durable."""
        os.makedirs(path, exist_ok=exist_ok)
        self._folders.add(os.path.abspath(path))

    def save(self, state_dict: object, path: str) -> None:
        """Write one file, or start to. It is durable after `commit`, or that raises."""
        if self._failure is not None and self.shared is None:
            return
        try:
            with config.options(**self.options):
                if self.shared is not None and self._save_shared(state_dict, path, self.shared):
                    return
                if self.overlap:
                    save = start_save(state_dict, path, None, zip_container=self.zip_container)
                    self._saves.append(save)
                else:
                    write(state_dict, path, zip_container=self.zip_container)
        except ours(Exception) as error:
            self.fail(error)

    def _save_shared(self, state_dict: object, path: str, shared: SharedFile) -> bool:
        """Save one file from several ranks, each of which calls this.

        Returns:
            Whether this rank is done. If one of them cannot, the first rank saves alone.
        """
        group, writers = shared.group, shared.writers
        try:
            with collective(group, TIMEOUT, call_of("DeepSpeed's save", path)):
                if leaves(state_dict).live:
                    raise ConfigError("it holds a module or an optimizer as an object")
            if self.overlap:
                save = distributed.save_async(state_dict, path, group=group, writers=writers)
                self._saves.append(save)
            else:
                distributed.save(state_dict, path, group=group, writers=writers)
        except ours(Exception) as error:
            text = f"{path}: one rank writes it alone, as without data_parallel: {error}"
            warnings.warn(text, UserWarning, stacklevel=2)
            return not shared.is_first
        return True

    def fail(self, error: BaseException) -> None:
        """Let `commit` raise on all ranks; the first error is kept."""
        self._failure = self._failure or error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file, through fastserial where it is installed."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return when the files of all ranks are durable. Every rank must call it.

        Raises:
            CheckpointFailedError: another rank could not save.
            Exception: this rank could not save.
        """
        saves, self._saves = self._saves, []
        for started in saves:
            error = started.exception()
            if error is not None:
                self.fail(error)
        self._uncommitted = False
        if self._failure is None:
            try:
                sync_folders(self._folders)
            except ours(OSError) as error:
                self.fail(error)
        failure, self._failure = self._failure, None
        _raise_on_all(failure, f"checkpoint {info.tag}")
        return True

    def forget(self) -> None:
        """Leave out the checkpoint that was begun: it is not complete, and nothing names it."""
        self._uncommitted = False
        self._saves = []

    def conclude(self) -> None:
        """Commit the pending checkpoint, and let `latest` name it. Every rank must call it.

        Raises:
            CheckpointFailedError: another rank could not save.
            Exception: this rank could not save.
        """
        info = self.get_commit_info()
        if info is None:
            return
        self.commit(info)
        if info.save_latest:
            self.write_latest(info.save_dir)

    def cleanup(self) -> None:
        """Commit the last checkpoint: the DeepSpeed engine is destroyed."""
        if self._uncommitted and dist.is_initialized():
            self.conclude()

    def write_latest(self, save_dir: str) -> None:
        """Let `latest` name the checkpoint that was committed. Every rank must call it.

        Raises:
            CheckpointFailedError: rank 0 could not write the file.
            WriteError: this is rank 0.
        """
        failure: Exception | None = None
        if dist.get_rank() == 0 and self.info is not None:
            try:
                replace_bytes(os.path.join(save_dir, _LATEST), self.info.tag.encode())
            except ours(OSError) as error:
                failure = error
        _raise_on_all(failure, _LATEST)


_engines: weakref.WeakSet[FastserialCheckpointEngine] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    for engine in list(_engines):
        info = engine.get_commit_info()
        if info is not None and engine.is_decoupled():
            _log.error(
                "%s: checkpoint %s was not committed; call engine.destroy() on every rank before "
                "the process group goes",
                info.save_dir,
                info.tag,
            )


def _raise_on_all(failure: BaseException | None, what: str) -> None:
    """Return if no rank failed; else raise on all of them."""
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    reasons = [text] * dist.get_world_size()
    if len(reasons) > 1:
        torch.distributed.all_gather_object(reasons, text)
    if failure is not None:
        raise failure
    failures = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    if failures:
        raise CheckpointFailedError(f"{what} is not complete, `latest` is unchanged. {failures}")


def enable(
    engine: Any, /, *, overlap: bool = False, data_parallel: bool = False, **options: Any
) -> Any:
    """Let a DeepSpeed engine save through fastserial, and return it. Call it on every rank.

    Args:
        engine: what `deepspeed.initialize` returned.
        overlap: write copies while the next forward and backward pass run; the next optimizer
            step waits for the files of all ranks, and raises what went wrong. Call
            `engine.destroy()` at the end.
        data_parallel: under ZeRO 0 to 2 the file of the model is written by all ranks that hold
            it (with DeepSpeed's "checkpoint.writer.data_parallel": "machine" by one of each node),
            as the first rank has it. Where they cannot, the first writes alone, and a warning says
            why.
        options: as in `fastserial.Config`.

    Raises:
        ConfigError: an option has an unknown name or an impossible value; or the engine was made
            with a checkpoint writer of DeepSpeed's, which decides which ranks write what.
    """
    for name, value in (("overlap", overlap), ("data_parallel", data_parallel)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, not {value!r}")
    current = engine.checkpoint_engine
    if isinstance(current, FastserialCheckpointEngine):
        config.current(**options)
        current.conclude()
        current.options, current.overlap = dict(options), overlap
        current.data_parallel = data_parallel
        _warn_if_alone(engine)
        return engine
    if not isinstance(current, TorchCheckpointEngine):
        raise ConfigError(
            f"the engine was made with DeepSpeed's {type(current).__name__}. Remove "
            '"writer" from the section "checkpoint" of its config, or call '
            "fastserial.integrations.deepspeed.install() before deepspeed.initialize"
        )
    zip_container = getattr(current, "zipfile_serialization", True)
    engine.checkpoint_engine = FastserialCheckpointEngine(
        options, zip_container, overlap, data_parallel
    )
    _warn_if_alone(engine)
    for name, method in _METHODS.items():
        bound = functools.partial(method, engine)
        setattr(engine, name, functools.update_wrapper(bound, getattr(type(engine), name)))
    return engine


def disable(engine: Any) -> None:
    """Give an engine DeepSpeed's own checkpoint engine back."""
    if isinstance(engine.checkpoint_engine, FastserialCheckpointEngine):
        engine.checkpoint_engine.conclude()
        engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
        for name in _METHODS:
            delattr(engine, name)


def _why_alone(engine: Any) -> str | None:
    """Return why the file of the model has one writer, None if several ranks can write it."""
    if engine.has_moe_layers:
        return "the experts have files of their own"
    if isinstance(engine.module, PipelineModule):
        return "a pipeline's stages save a file for each layer"
    if engine.use_node_local_storage():
        return 'with "use_node_local_storage" each node has a file of its own'
    if not engine.checkpoint_engine.zip_container:
        return 'the legacy format has one writer; set "checkpoint_serialization" to true'
    return None


def _warn_if_alone(engine: Any) -> None:
    why = _why_alone(engine)
    if engine.checkpoint_engine.data_parallel and why is not None:
        warnings.warn(f"data_parallel has no effect: {why}", UserWarning, stacklevel=3)


def _save_model(engine: Any, *arguments: Any, **named: Any) -> Any:
    """Call DeepSpeed's method that saves the model, on several ranks with one path.

    Under ZeRO 3 each rank has a file of its own.
    """
    ours, stock = engine.checkpoint_engine, type(engine)._save_checkpoint
    is_divided = engine.zero_optimization_partition_weights()
    if not ours.data_parallel or is_divided or _why_alone(engine) is not None:
        return stock(engine, *arguments, **named)
    group = groups._get_sequence_data_parallel_group()
    if dist.get_world_size(group=group) == 1:
        return stock(engine, *arguments, **named)
    by_stock, engine.save_non_zero_checkpoint = engine.save_non_zero_checkpoint, True
    ours.shared = SharedFile(group, writers_of(engine), by_stock)
    try:
        return stock(engine, *arguments, **named)
    finally:
        engine.save_non_zero_checkpoint, ours.shared = by_stock, None


def _save_checkpoint(
    engine: Any,
    save_dir: str,
    tag: Any = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """Call DeepSpeed's method, but write `latest` ourselves: DeepSpeed truncates the old one."""
    stock, ours = type(engine).save_checkpoint, engine.checkpoint_engine
    later, before = ours.is_decoupled(), ours.info
    by_stock = save_latest and later  # then DeepSpeed only records that
    try:
        done = stock(engine, save_dir, tag, client_state or {}, by_stock, exclude_frozen_parameters)
    except BaseException:
        if ours.info is not before:
            ours.forget()
        raise
    if save_latest and not later:
        ours.write_latest(save_dir)
    return done


def _copy_recovery_script(engine: Any, save_path: str) -> None:
    """Call DeepSpeed's method, but let a full disk fail on all ranks, not on rank 0 alone."""
    try:
        type(engine)._copy_recovery_script(engine, save_path)
    except ours(OSError) as error:
        engine.checkpoint_engine.fail(error)


def _commit_decoupled_checkpoint(engine: Any) -> None:
    """Replace DeepSpeed's method, which it calls before an optimizer step: we write `latest`."""
    engine.checkpoint_engine.conclude()


def _load_checkpoint(engine: Any, *arguments: Any, **named: Any) -> Any:
    """Call DeepSpeed's method once the pending checkpoint is committed."""
    engine.checkpoint_engine.conclude()
    return type(engine).load_checkpoint(engine, *arguments, **named)


_METHODS: dict[str, Callable[..., Any]] = {
    "save_checkpoint": _save_checkpoint,
    "_save_checkpoint": _save_model,
    "_copy_recovery_script": _copy_recovery_script,
    "_commit_decoupled_checkpoint": _commit_decoupled_checkpoint,
    "load_checkpoint": _load_checkpoint,
}
_original: Any = None


def install() -> None:
    """Honour the section "fastserial" of DeepSpeed's config. May be called again.

    The section is `true`, or options as for `enable` with an optional `enabled`. Where it is, the
    section "checkpoint.writer" has no effect.
    """
    global _original
    if _original is None:
        _original = DeepSpeedEngine._configure_checkpointing
        DeepSpeedEngine._configure_checkpointing = functools.wraps(_original)(_configure)


def uninstall() -> None:
    """Ignore the section again; engines made before stay as they are."""
    global _original
    if _original is not None:
        DeepSpeedEngine._configure_checkpointing = _original
        _original = None


def _configure(engine: Any) -> None:
    settings = engine._config._param_dict
    options = _section(settings.get(SECTION))
    if options is None:
        _original(engine)
        return
    unused = [*_take_writer(settings, options), *_take_aio(settings, options)]
    if unused:
        warnings.warn(
            f"without effect on checkpoints, in DeepSpeed's config: {', '.join(unused)}. Set "
            f"engine, block_size, queue_depth or threads in its section {SECTION!r}",
            UserWarning,
            stacklevel=2,
        )
    # DeepSpeed's writers may be missing, and must not decide which ranks save.
    engine._config.checkpoint_config = {**engine._config.checkpoint_config, "writer": None}
    _original(engine)
    enable(engine, **options)


def _take_writer(settings: Mapping[str, Any], options: dict[str, Any]) -> list[str]:
    """Set options from DeepSpeed's section "checkpoint.writer".

    Returns:
        The keys that have no effect: others than DeepSpeed's, and values that contradict ours.
    """
    writer = (settings.get("checkpoint") or {}).get("writer")
    if not isinstance(writer, Mapping):
        return []
    given = dict(writer)
    if given.pop("data_parallel", None) is not None:
        options.setdefault("data_parallel", True)
    if given.pop("decoupled", False):
        options.setdefault("overlap", True)
    if given.pop("show_statistics", False):
        options.setdefault("on_report", _say_report)
    size = given.pop("io_buffer_size", None)
    if size is not None and not {"block_size", "queue_depth"} & options.keys():
        options["queue_depth"] = max(1, int(size) // config.current().block_size)
    same = {"type": "fast", "io_buffer_double": True, "io_multiplier": 1}
    return [
        f"checkpoint.writer.{key}"
        for key, value in given.items()
        if key not in same or str(value).lower() != str(same[key]).lower()
    ]


def _say_report(report: SaveReport) -> None:
    if report.ranks or report.rank == 0:  # once for each file, of the ranks that wrote it
        for line in str(report).splitlines():
            say(line)


def _take_aio(settings: Mapping[str, Any], options: dict[str, Any]) -> list[str]:
    """Set the engine `deepspeed` from the section "aio"; return the keys that have no effect."""
    aio = settings.get("aio")
    if not isinstance(aio, Mapping) or not aio:
        return []
    if options.get("engine") != AioEngine.name:
        swapped = "nvme" in str(settings.get("zero_optimization")).lower()  # then it is for that
        return [] if swapped else ["aio"]
    known = {field.name for field in fields(AioSettings)}
    chosen = AioSettings(**{key: value for key, value in aio.items() if key in known})
    options["engine"] = functools.partial(AioEngine, settings=chosen)
    options.setdefault("threads", chosen.intra_op_parallelism)
    return [f"aio.{key}" for key in aio if key not in known]


def _section(value: Any) -> dict[str, Any] | None:
    """Return the options in a section of the config, None if it is missing or disabled.

    Raises:
        ConfigError: it is neither a truth value nor options.
    """
    if value is None or isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(f'the section "{SECTION}" must be true, false or options, not {value!r}')
    options = dict(value)
    return options if options.pop("enabled", True) else None
