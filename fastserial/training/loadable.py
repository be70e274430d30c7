"""Whether `weights_only`, which refuses classes that torch does not know, loads what is saved."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastserial.errors import ConfigError
from fastserial.formats.zip.records import PICKLE
from fastserial.nests import shown, walk
from fastserial.overlap.asynchronous import size_of

__all__ = ["check_loadable", "warn_of_refused"]

_SHOWN = 5
_REMEDY = (
    "Keep plain values (`float(x)` for NumPy's) and tensors in it, allow what you trust by "
    "torch.serialization.add_safe_globals, or (one process) make the Checkpointer with "
    "weights_only=False"
)
_SAFE = {dict, OrderedDict, Counter, list, tuple}  # what is in them is looked at by itself


def check_loadable(pickled: bytes) -> None:
    """Make sure that `weights_only` loads a pickle of torch's.

    Raises:
        ConfigError: it does not; says what it holds.
    """
    if refused := _refused(pickled):
        raise ConfigError(
            f"a checkpoint of this state cannot be resumed from with weights_only=True: it would "
            f"hold {', '.join(refused[:_SHOWN])}. {_REMEDY}"
        )


def warn_of_refused(state: Mapping[str, Any], path: str, stacklevel: int) -> None:
    """Warn if `weights_only` refuses what is saved, and name it.

    Args:
        state: what is saved; of live optimizers the groups and states are looked at, too.
    """
    found: dict[type, str] = {}  # where the first one of each type is
    fine: set[type] = {*_SAFE}

    def look(value: Any, before: str) -> None:
        for path, one in walk(value):
            kind, where = type(one), shown(path, before)
            if isinstance(one, torch.optim.Optimizer):
                look(one.param_groups, f"{where}.param_groups")
                look(list(one.state.values()), f"{where}.state")
            elif isinstance(one, torch.Tensor | torch.nn.Module) or kind in fine or kind in found:
                continue
            elif _pickled_and_refused(one):
                found[kind] = where
            else:
                fine.add(kind)

    look(state, "")
    if found:
        refused = [f"{where} ({kind.__module__}.{kind.__name__})" for kind, where in found.items()]
        warnings.warn(
            f"{path}: resume() will refuse this checkpoint, as weights_only=True does not load "
            f"{', '.join(refused[:_SHOWN])}. {_REMEDY}",
            UserWarning,
            stacklevel=stacklevel,
        )


def _pickled_and_refused(value: Any) -> bool:
    refused: list[str] = []
    try:
        size_of(value, "x.pt", lambda pickled: refused.extend(_refused(pickled)))
    except Exception:  # it cannot be pickled: the save says so
        return False
    return bool(refused)


def _refused(pickled: bytes) -> list[str]:
    """Return the names of what a pickle of torch's holds and `weights_only` refuses."""
    look: Callable[[Any], list[str]] = torch.serialization.get_unsafe_globals_in_checkpoint
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"archive/{PICKLE}", pickled)
        archive.writestr("archive/version", "3\n")
    file.seek(0)
    return sorted(look(file))
