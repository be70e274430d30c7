"""The metadata of a save, made when somebody looks at it: of thousands of tensors that takes long.

The coordinator makes it of the plan at the end of a save. To all ranks DCP sends the pickle that is
in `.metadata` then; few jobs look at what it says there.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from fastserial.distributed.dcp.steps import wrapper_of_step
from fastserial.errors import DistributedError
from fastserial.memory.held_settings import paused_collection

__all__ = ["deferred", "send_as"]

_PICKLED = "_pickled"
_MAKE = "_make"
_lock = threading.RLock()


def send_as(metadata: Metadata, pickled: bytes) -> None:
    """Let DCP send these bytes when it sends this metadata to all ranks next.

    Does nothing where it will not be sent.
    """
    step = wrapper_of_step("all_reduce")
    if step is not None and step.use_dist and type(metadata) is Metadata:
        object.__setattr__(metadata, _PICKLED, pickled)
        object.__setattr__(metadata, "__class__", _Sent)


class _Disguised(Metadata):
    """Becomes ordinary metadata as soon as somebody looks at it.

    Until then `isinstance` takes it for that; only what goes around it sees what it is: `type()`,
    `object.__setattr__`, `inspect.getattr_static`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return Metadata(*args, **kwargs)  # somebody makes another one of the same type

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # `isinstance` asks for it
            return Metadata
        _unveil(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _unveil(self)
        setattr(self, name, value)

    def __delattr__(self, name: str) -> None:
        _unveil(self)
        delattr(self, name)


class _Sent(_Disguised):
    """On the rank that has it: pickled once by what is in the file."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__reduce_ex__":
            pickled = _unveil(self)
            if pickled is not None:
                return lambda protocol: (_received, (pickled,))
        return _Disguised.__getattribute__(self, name)  # `super()` needs the class it had


class _Deferred(_Disguised):
    """Made by a function."""


def deferred(make: Callable[[], Metadata]) -> Metadata:
    """Return metadata that is made by a function when it is looked at."""
    found = object.__new__(_Deferred)
    object.__setattr__(found, _MAKE, make)
    return found


def _received(pickled: bytes) -> Metadata:
    """Return what unpickles these bytes when it is looked at."""
    return deferred(partial(_unpickled, pickled))


def _unpickled(pickled: bytes) -> Metadata:
    try:
        found: Metadata = pickle.loads(pickled)
    except Exception as error:  # an AttributeError would be taken for a missing attribute
        what = f"the metadata that it sent cannot be unpickled here: {error}"
        raise DistributedError(0, what) from error
    return found


def _unveil(metadata: Metadata) -> bytes | None:
    """Make it ordinary metadata; return what it was pickled to, None if it was not."""
    with _lock:
        kind = type(metadata)
        if not issubclass(kind, _Disguised):
            return None
        values: dict[str, Any] = object.__getattribute__(metadata, "__dict__")
        make, pickled = values.get(_MAKE), values.get(_PICKLED)
        if make is not None:
            with paused_collection():
                values = vars(make())
        # in two steps: an interrupt between them does no harm
        plain = {name: value for name, value in values.items() if name != _PICKLED}
        object.__setattr__(metadata, "__dict__", plain)
        object.__setattr__(metadata, "__class__", Metadata)
        return pickled


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have had it


os.register_at_fork(after_in_child=_after_fork)
