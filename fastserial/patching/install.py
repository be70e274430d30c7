"""Swap the patched functions into torch, and the stock ones back.

The functions below `torch.save` are replaced, never `save` itself, so that names bound before
`install()` (`from torch import save`) are covered. Their code is compiled from the installed
source and runs in torch's own namespace. Everything is prepared first and swapped at once.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastserial import import_hook
from fastserial.errors import PatchError, UnsupportedTorchWarning
from fastserial.interrupts import Locked
from fastserial.memory.held_settings import paused_collection
from fastserial.patching.patches import Installation, Swap, prepare

_log = logging.getLogger("fastserial")
_REMEDY = (
    "torch.save and torch.load stay stock: correct, but not faster. See "
    "`fastserial doctor` for what is wrong, or `fastserial patches check` for the details."
)


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """Whether torch is patched, with which patch, and the reason if it is not.

    Attributes:
        installed: fastserial's functions are in torch's namespace.
        torch: the version of the imported torch; None before torch is imported.
        patch: name of the patch in use.
        exact: the patch is made for this version (else only its hashes match).
        functions: the patched functions.
        replaced: those that other code replaced after `install()`.
        reason: why torch is stock.
    """

    installed: bool
    torch: str | None
    patch: str | None = None
    exact: bool = False
    functions: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    reason: str | None = None


_HOME = "torch.serialization"
_KEY = "_fastserial_installation"  # in that module: for a second copy of this one, after a reload

_lock = threading.RLock()
_installation: Installation | None = getattr(sys.modules.get(_HOME), _KEY, None)
_ready: Installation | None = None  # for `patched` while nothing is installed
_reason: str | None = "install() has not been called"
_warned: set[str] = set()


def install(*, strict: bool = False, **options: Any) -> bool:
    """Make `torch.save` and `torch.load` use fastserial; return whether they do.

        fastserial.install(durable=False)

    May be called again and from any thread; it imports torch. If no patch fits the installed
    torch, torch stays stock and one warning says why. What cannot be used of the environment is
    named by a warning, and everything else stays in force.

    Args:
        strict: raise instead of warning.
        options: options for all saves and loads, as in `fastserial.Config`; a later call changes
            the options that it names and keeps the others, until `uninstall()`.

    Raises:
        PatchError: `strict`, and the installed torch cannot be patched.
        ConfigError: an option has an unknown name or an impossible value.
        EngineUnavailableError: there is no such engine, or it cannot run here.
    """
    from fastserial import config, engines

    # report wrong options now, not hours later at the first checkpoint
    chosen = config.current(**options)
    if chosen.safetensors:
        from fastserial.patching import safetensors_hooks

        safetensors_hooks.switch_on()
    engines.factory_of(chosen.engine)
    config.set_installed(**options)
    reason = switch_on(strict)
    if reason is not None:
        with Locked(_lock):
            first_time = reason not in _warned
            _warned.add(reason)
        if first_time:
            warnings.warn(f"{reason}. {_REMEDY}", UnsupportedTorchWarning, stacklevel=2)
    return reason is None


def switch_on(strict: bool = False) -> str | None:
    """Swap our functions in, whatever the options are; return why torch stays stock, or None.

    Raises:
        PatchError: `strict`, and the installed torch cannot be patched.
    """
    global _installation, _reason
    _import()
    with paused_collection(), Locked(_lock):  # what is made stays: no reason to collect
        # not in force: uninstalled by other means, e.g. importlib.reload
        if _installation is None or not _installation.in_force:
            try:
                made = _checked()
            except PatchError as error:
                _reason = str(error)
                if strict:
                    raise PatchError(f"{_reason}. {_REMEDY}") from None
                return _reason
            # set before the swap: a fork in between then finds nothing half-applied
            _installation, _reason = made, None
            ours = {swap.name: swap.ours for swap in made.swaps}
            made.swaps[0].namespace.update({_KEY: made, **ours})
    hide_from_compiler()
    return None


def uninstall() -> bool:
    """Restore torch's own functions; return whether any was replaced.

        fastserial.uninstall()
        assert not fastserial.installed()

    Forgets the options given to `install()`. A function that other code replaced after
    `install()` stays, with a warning; if it calls ours, that behaves as stock from now on.
    """
    global _installation, _reason
    from fastserial import config

    config.forget_installed()
    with Locked(_lock):
        if _installation is None:
            return False
        found = _installation.swaps
        ours = {swap.name: swap.original for swap in found if swap.in_force}
        foreign = [
            swap for swap in found if not swap.in_force and swap.current is not swap.original
        ]
        found[0].namespace.update(ours)
        for swap in found:
            # a wrapper or an alias that still refers to our function gets stock behaviour from it
            swap.ours.__code__ = swap.original.__code__
        found[0].namespace.pop(_KEY, None)
        _installation, _reason = None, "uninstall() was called"
        hooks = sys.modules.get("fastserial.patching.safetensors_hooks")
        if hooks is not None:
            hooks.switch_off()
    if foreign:
        names = ", ".join(swap.full_name for swap in foreign)
        warnings.warn(
            f"{names} was replaced by other code after fastserial.install(); it is left as it is",
            RuntimeWarning,
            stacklevel=2,
        )
    return True


def installed() -> bool:
    """Return whether torch runs fastserial's functions.

        if not fastserial.installed():
            print(fastserial.status().reason)

    False also if other code has replaced them after `install()`.
    """
    found = _installation
    return found is not None and found.in_force


def status() -> PatchStatus:
    """Return whether torch is patched, with which patch, and the reason if it is not.

        print(fastserial.status())

    It does not import torch.
    """
    # a torch halfway through its own import has no version yet
    version = str(getattr(sys.modules.get("torch"), "__version__", "")) or None
    with Locked(_lock):
        found = _installation
        if found is None or not found.in_force:
            reason = _reason or "other code replaced all of our functions"
            return PatchStatus(False, version, reason=reason)
        functions = tuple(swap.full_name for swap in found.swaps)
        replaced = tuple(swap.full_name for swap in found.swaps if not swap.in_force)
        return PatchStatus(True, version, found.patch, found.exact, functions, replaced)


def get_original(name: str) -> Any:
    """Return torch's own object of a name in `torch.serialization`, patched or not.

    Raises:
        AttributeError: torch has no such name.
    """
    module = importlib.import_module(_HOME)
    swap = _swap_of(name, _installation)
    return getattr(module, name) if swap is None else swap.original


def patched(name: str) -> Callable[..., Any] | None:
    """Return our copy of a function of `torch.serialization`, whether torch runs it or not.

    None if the installed torch has to stay stock.
    """
    global _ready
    _import()
    with Locked(_lock):
        found = _installation or _ready
        if found is None:
            try:
                found = _ready = _checked()
            except PatchError as error:
                _log.info("%s", error)
                return None
        swap = _swap_of(name, found)
    return None if swap is None else swap.ours


def _swap_of(name: str, found: Installation | None) -> Swap | None:
    swaps = found.swaps if found is not None else ()
    return next((swap for swap in swaps if swap.name == name), None)


def _import() -> None:
    """Import what is needed before our lock is taken.

    Another thread may hold the lock of one of these imports while it waits for ours.
    """
    importlib.import_module("torch")
    with paused_collection():
        importlib.import_module("fastserial.patching.save_hooks")


def _checked() -> Installation:
    """Make the functions ready; torch is not touched.

    Raises:
        PatchError: torch has to stay stock.
    """
    import torch

    from fastserial.patching import save_hooks

    with paused_collection():
        installation = prepare(str(torch.__version__))
        objection = save_hooks.self_check()
    if objection is not None:
        raise PatchError(f"torch {torch.__version__} did not pass the self-check: {objection}")
    return installation


@functools.cache
def hide_from_compiler() -> None:
    """Keep torch.compile from tracing fastserial, as it never traces torch.serialization."""
    import_hook.when_imported("torch._dynamo.trace_rules", _dynamo_imported)


def _dynamo_imported(trace_rules: Any) -> None:
    try:
        trace_rules.add("fastserial")
    except Exception as error:  # must not break `import torch._dynamo`
        _log.warning("torch.compile may trace fastserial: %r", error)


def _after_fork() -> None:
    # a thread that was inside install() or uninstall() does not exist in the child
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
