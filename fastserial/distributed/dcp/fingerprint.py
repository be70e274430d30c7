"""What of a rank's flattened state decides its plan, to be compared with that of earlier saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import DTensor

from fastserial.distributed.dcp.local_rows import OTHER, REPLICA, SHARD, kind_of
from fastserial.distributed.state.facts import by_type, shardings

__all__ = ["fingerprint"]

_STRIDES = hasattr(TensorProperties(), "strides")  # whether they are in `.metadata`
_local_of = attrgetter("_local_tensor")
_plain = attrgetter("shape", "dtype", "layout", "requires_grad")


def fingerprint(state: Mapping[str, Any], last: Sequence[Any] | None = None) -> list[Any] | None:
    """Return what decides the plan of a flattened state, None if that is not known.

    It changes with keys, dtypes, shapes and shardings. Nothing of the state is kept alive.

    Args:
        last: that of an earlier save, if there is one.
    """
    values = list(state.values())
    types = list(map(type, values))
    found: list[Any] = [list(state), types]
    for type_, some in by_type(values, types).items():
        kind = _kind_of_all(type_, some)
        if kind is None:
            return None
        if kind == REPLICA:
            found.append(list(map(_plain, some)))
            found.append([value.stride() for value in some] if _STRIDES else None)
        elif kind == SHARD:
            found.append(shardings(some, True, last))
            found.append([value._local_tensor.stride() for value in some] if _STRIDES else None)
    return found


def _kind_of_all(type_: type, some: Sequence[Any]) -> int | None:
    """Return of which kind all values of a type are, None if of another one or several."""
    if issubclass(type_, DTensor):
        locals_ = set(map(type, map(_local_of, some)))
        if locals_ == {torch.Tensor}:
            return SHARD
    kinds = set(map(kind_of, some))
    kind = kinds.pop()
    return None if kinds or kind == OTHER else kind
