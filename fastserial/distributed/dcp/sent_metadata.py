"""The metadata of a save as DCP sends it to all ranks: the pickle that is in the file already.

A rank unpickles it when somebody looks at it. Few jobs do, and with thousands of tensors that takes
longer than a save.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from fastserial.distributed.dcp.steps import wrapper_of_step
from fastserial.errors import DistributedError
from fastserial.memory.gc_pause import paused_collection

__all__ = ["send_as"]

_PICKLED = "_pickled"
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

    Until then `isinstance` takes it for that, and only `type()` does not.
    """

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


class _Received(_Disguised):
    """On the other ranks."""


def _received(pickled: bytes) -> Metadata:
    """Return what unpickles these bytes when it is looked at."""
    found = object.__new__(_Received)
    object.__setattr__(found, _PICKLED, pickled)
    return found


def _unveil(metadata: Metadata) -> bytes | None:
    """Make it ordinary metadata; return what it was pickled to, None if somebody else did."""
    with _lock:
        kind = type(metadata)
        if not issubclass(kind, _Disguised):
            return None
        values: dict[str, Any] = object.__getattribute__(metadata, "__dict__")
        pickled: bytes = values[_PICKLED]
        if kind is _Received:
            try:
                with paused_collection():
                    values.update(vars(pickle.loads(pickled)))
            except Exception as error:  # an AttributeError would be taken for a missing attribute
                what = f"the metadata that it sent cannot be unpickled here: {error}"
                raise DistributedError(0, what) from error
        object.__setattr__(metadata, "__class__", Metadata)
        del values[_PICKLED]
        return pickled
