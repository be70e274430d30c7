"""Install fastserial as soon as torch is imported: what `fastserial.pth` runs at start.

The `.pth` file calls `watch()` here unless `FASTSERIAL` is empty, 0, false, no or off. Nothing here
may stop the interpreter or `import torch`: trouble becomes a warning. Nor may it take long: every
Python process of a job runs it, and few of them use torch.
"""

from __future__ import annotations

import os

VARIABLE = "FASTSERIAL"
# A program for `python -c`: exit status 0 where `fastserial.pth` is active.
PROBE = "import sys; sys.exit('fastserial.startup' not in sys.modules)"


def switch(variable: str = VARIABLE) -> bool | None:
    """Return what the environment asks for: on, off, or (None) nothing that is known."""
    value = os.environ.get(variable, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    return False if value in ("0", "false", "no", "off") else None


def checked_switch(variable: str = VARIABLE) -> bool | None:
    """Return what the environment asks for, as `switch`; warn of a value that is not known."""
    found = switch(variable)
    if found is None and os.environ.get(variable, "").strip():
        _warn_of_value(variable)
    return found


def watch() -> None:
    """Install once torch is imported, or at once if it already is.

    If the environment has an unknown value, nothing is installed, and a warning names it then.
    """
    try:
        from fastserial.import_hook import when_imported

        when_imported("torch", _torch_imported if switch() else _torch_imported_for_nothing)
    except Exception as error:
        _warn_of(error)


def _torch_imported(_: object) -> None:
    try:
        from fastserial.import_hook import when_imported
        from fastserial.patching.install import install

        install()
        when_imported("deepspeed.runtime.engine", _deepspeed_imported)
    except Exception as error:
        _warn_of(error)


def _torch_imported_for_nothing(_: object) -> None:
    _warn_of_value(VARIABLE)


def _deepspeed_imported(_: object) -> None:
    """Support the section of fastserial in DeepSpeed's config."""
    try:
        from fastserial.integrations.deepspeed import install

        install()
    except Exception as error:
        _warn_of(error)


def _warn_of(error: Exception) -> None:
    _warn(f"fastserial could not be installed: {error!r}")


def _warn_of_value(variable: str) -> None:
    value = os.environ.get(variable)
    _warn(f"{variable}={value} is neither on nor off for fastserial: set it to 1 or 0")


def _warn(text: str) -> None:
    import contextlib
    import warnings

    # `-W error` must not break `import torch` either
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=4)
