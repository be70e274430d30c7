"""DeepSpeed's checkpoints through fastserial.

    import fastserial.integrations.deepspeed as fast

    engine, *_ = deepspeed.initialize(...)
    fast.enable(engine)  # save_checkpoint and load_checkpoint unchanged, the same files

or, before `deepspeed.initialize`, by configuration:

    fast.install()  # honours the section "fastserial" of DeepSpeed's config
    deepspeed.initialize(config={..., "fastserial": {"engine": "threads"}})

Files and names are DeepSpeed's; stock DeepSpeed and stock torch read them. What differs: each file
is written whole or not at all, and `latest` names a checkpoint only when the files of all ranks are
on their devices. If one rank cannot save, all ranks raise and `latest` stays as it was.

`save_full(engine, path)` writes one ordinary torch file instead of a folder, and `load_full(engine,
path)` loads it on any number of ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from fastserial import config
from fastserial.checkpoints.save import save
from fastserial.errors import ConfigError, FastserialError
from fastserial.files.durable import replace_text, sync_folders
from fastserial.integrations.deepspeed_full import load_full, save_full

if TYPE_CHECKING:
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo

__all__ = [
    "CheckpointFailedError",
    "FastserialCheckpointEngine",
    "disable",
    "enable",
    "install",
    "load_full",
    "save_full",
    "uninstall",
]

SECTION = "fastserial"
_LATEST = "latest"


class CheckpointFailedError(FastserialError, RuntimeError):
    """Another rank could not save its part of a checkpoint; `latest` is as it was."""


class FastserialCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # no annotations there
    """Saves through fastserial, and fails on all ranks or on none.

    An error in `save` is kept until `commit`, where the ranks tell each other: a rank that raised
    at once would leave the others waiting for it.

    Saving that overlaps training would let `save` return early, say so in `is_decoupled`, and
    wait in `commit`, which DeepSpeed then calls before the next optimizer step.
    """

    def __init__(self, options: Mapping[str, Any], zip_container: bool = True) -> None:
        """Make an engine.

        Args:
            options: as in `fastserial.Config`.
            zip_container: torch's zip format; False is the legacy one.

        Raises:
            ConfigError: an option has an unknown name or an impossible value.
        """
        super().__init__()
        config.current(**options)
        self.name = type(self).__name__
        self.options = dict(options)
        self.zip_container = zip_container
        self.info: CheckpointCommitInfo | None = None
        self._folders: set[str] = set()
        self._failure: Exception | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""
        self.info = info
        self._failure = None
        self._folders = {os.path.abspath(info.save_dir)}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, whose name is made durable by `commit`."""
        os.makedirs(path, exist_ok=exist_ok)
        self._folders.add(os.path.abspath(path))

    def save(self, state_dict: object, path: str) -> None:
        """Write one file. When this returns it is on its device, or `commit` will raise."""
        if self._failure is not None:
            return
        try:
            with config.options(**self.options):
                save(state_dict, path, zip_container=self.zip_container)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Let `commit` raise on all ranks; the first error is kept."""
        self._failure = self._failure or error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file, through fastserial where it is installed."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return when the files of all ranks are durable. Every rank must call it.

        Raises:
            CheckpointFailedError: another rank could not save.
            Exception: what this rank could not save for.
        """
        failure, self._failure = self._failure, None
        if failure is None:
            try:
                sync_folders(self._folders)
            except OSError as error:
                failure = error
        _agree(failure, f"checkpoint {info.tag}")
        return True

    def write_latest(self, save_dir: str) -> None:
        """Let `latest` name the checkpoint that was committed. Every rank must call it.

        Raises:
            CheckpointFailedError: rank 0 could not write the file.
            WriteError: this is rank 0.
        """
        failure: Exception | None = None
        if dist.get_rank() == 0 and self.info is not None:
            try:
                replace_text(os.path.join(save_dir, _LATEST), self.info.tag)
            except OSError as error:
                failure = error
        _agree(failure, _LATEST)


def _agree(failure: Exception | None, what: str) -> None:
    """Return if no rank failed; else raise on all of them."""
    world = dist.get_world_size()
    flag = torch.tensor([int(failure is not None)], device=get_accelerator().current_device_name())
    if world > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if not flag.item():
        return
    reasons: list[str | None] = [None] * world
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    if world > 1:
        torch.distributed.all_gather_object(reasons, text)
    if failure is not None:
        raise failure
    failures = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
    raise CheckpointFailedError(f"{what} is not complete, `latest` is as it was. {failures}")


def enable(engine: Any, /, **options: Any) -> Any:
    """Let a DeepSpeed engine save through fastserial, and return it. Call it on every rank.

    Args:
        engine: what `deepspeed.initialize` returned.
        options: as in `fastserial.Config`.

    Raises:
        ConfigError: an option has an unknown name or an impossible value; or the engine was made
            with a checkpoint writer of DeepSpeed's, which decides which ranks write what.
    """
    current = engine.checkpoint_engine
    if isinstance(current, FastserialCheckpointEngine):
        config.current(**options)
        current.options = dict(options)
        return engine
    if not isinstance(current, TorchCheckpointEngine):
        raise ConfigError(
            f"the engine was made with DeepSpeed's {type(current).__name__}. Remove "
            '"writer" from the section "checkpoint" of its config, or call '
            "fastserial.integrations.deepspeed.install() before deepspeed.initialize"
        )
    zip_container = getattr(current, "zipfile_serialization", True)
    engine.checkpoint_engine = FastserialCheckpointEngine(options, zip_container)
    for name, method in _METHODS.items():
        bound = functools.partial(method, engine)
        setattr(engine, name, functools.update_wrapper(bound, getattr(type(engine), name)))
    return engine


def disable(engine: Any) -> None:
    """Give an engine DeepSpeed's own checkpoint engine back."""
    if isinstance(engine.checkpoint_engine, FastserialCheckpointEngine):
        engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
        for name in _METHODS:
            delattr(engine, name)


def _save_checkpoint(
    engine: Any,
    save_dir: str,
    tag: Any = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """DeepSpeed's `save_checkpoint`, but `latest` is written by us: it truncates the old one."""
    stock = type(engine).save_checkpoint
    done = stock(engine, save_dir, tag, client_state or {}, False, exclude_frozen_parameters)
    if save_latest:
        engine.checkpoint_engine.write_latest(save_dir)
    return done


def _copy_recovery_script(engine: Any, save_path: str) -> None:
    """DeepSpeed's, but a full disk must not stop rank 0 alone."""
    try:
        type(engine)._copy_recovery_script(engine, save_path)
    except OSError as error:
        engine.checkpoint_engine.fail(error)


_METHODS: dict[str, Callable[..., Any]] = {
    "save_checkpoint": _save_checkpoint,
    "_copy_recovery_script": _copy_recovery_script,
}
_original: Any = None


def install() -> None:
    """Honour the section "fastserial" of DeepSpeed's config. May be called again.

    The section is `true`, or options as in `fastserial.Config` with an optional `enabled`. Where it
    is, the section "checkpoint.writer" has no effect.
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
    options = _section(engine._config._param_dict.get(SECTION))
    if options is None:
        _original(engine)
        return
    # Its writers need not be there, and must not decide which ranks save.
    engine._config.checkpoint_config = {**engine._config.checkpoint_config, "writer": None}
    _original(engine)
    enable(engine, **options)


def _section(value: Any) -> dict[str, Any] | None:
    """Return the options in a section of the config, None if it asks for nothing.

    Raises:
        ConfigError: it is neither a truth value nor options.
    """
    if value is None or isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise ConfigError(f'the section "{SECTION}" must be true, false or options, not {value!r}')
    options = dict(value)
    return options if options.pop("enabled", True) else None
