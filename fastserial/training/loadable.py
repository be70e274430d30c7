"""Whether `weights_only`, which refuses classes that torch does not know, loads what is saved."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from fastserial.nests import shown, walk
from fastserial.training.rank_values import packed, unpacked

_SHOWN = 5
_SAFE = {dict, OrderedDict, Counter, list, tuple}  # their items are checked one by one


def refused(state: Mapping[str, Any]) -> str:
    """Return what `resume` would refuse in a state, and the remedy; an empty string if nothing.

    One value of each type is tested.

    Args:
        state: what is saved; of live optimizers, the groups and states are tested.
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
            elif _is_refused(one):
                found[kind] = where
            else:
                fine.add(kind)

    look(state, "")
    if not found:
        return ""
    names = [f"{where} ({kind.__module__}.{kind.__name__})" for kind, where in found.items()]
    return (
        "resume() will refuse this checkpoint, as weights_only=True does not load "
        f"{', '.join(names[:_SHOWN])}. Keep plain values (`float(x)` for NumPy's) and tensors in "
        "it, allow what you trust by torch.serialization.add_safe_globals, or (one process) make "
        "the Checkpointer with weights_only=False"
    )


def _is_refused(value: Any) -> bool:
    """Return whether torch's unpickler refuses a value; False if it cannot be pickled at all."""
    try:
        data = packed(value, with_tensors=False)
    except Exception:  # the save raises it
        return False
    try:
        unpacked(data, weights_only=True)
    except Exception:
        return True
    return False
