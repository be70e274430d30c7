"""torch's weights-only unpickler, for what is nearly always in a checkpoint, in C.

Torch interprets each opcode in Python, some 35 a tensor. A plain pickle, which imports nothing but
storage types, dtypes and what rebuilds tensors, can do no harm in Python's own unpickler: there is
nothing to call but what torch's would call. Anything else, and any error, is torch's own to read.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import _weights_only_unpickler as torchs

from fastserial.formats.plain_pickle import imported_names

__all__ = ["WeightsOnlyUnpickler", "unpickler_module"]

_rebuild: Any = torch._utils


class _Call:
    """A function that can be called; nothing can be set on it, whatever a pickle builds."""

    __slots__ = ()


class _RebuildTensor(_Call):
    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return _rebuild._rebuild_tensor_v2(*args)


class _RebuildParameter(_Call):
    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return _rebuild._rebuild_parameter(*args)


_NAMES: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _RebuildTensor(),
    "torch._utils._rebuild_parameter": _RebuildParameter(),
    "torch.Size": torch.Size,
    "torch.device": torch.device,
}


def _find(name: str) -> Any:
    """Return what a plain pickle gets for a name that torch allows, None for all others."""
    allowed: Any = torchs._get_allowed_globals().get(name)
    if allowed is not None and name in _NAMES:
        return _NAMES[name]
    if isinstance(allowed, torch.serialization.StorageType):
        new: Any = type(allowed)  # one of its own, which the pickle may change
        return new(name.rpartition(".")[2])
    return allowed if isinstance(allowed, torch.dtype) else None


class _Refused(pickle.UnpicklingError):
    """Torch's unpickler is to say what is wrong."""


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, load_storage: Callable[[Any], Any]) -> None:
        super().__init__(cast("Any", io.BufferedReader(cast("Any", io.BytesIO(data)))))  # peeks
        self.failure: BaseException | None = None
        self._load_storage = load_storage

    def find_class(self, module: str, name: str) -> Any:
        found = _find(f"{module}.{name}")
        if found is None:
            raise _Refused(name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not tuple or not pid or pid[0] != "storage":
            raise _Refused("persistent id")
        try:
            return self._load_storage(pid)
        except BaseException as error:
            self.failure = error
            raise


class WeightsOnlyUnpickler(torchs.Unpickler):
    """Loads what torch's class loads, and fails as it does.

    Made-up pickles that set items of a list or a tensor, or attributes of a storage type, load
    here and not there: all that they change is what they built themselves.
    """

    def __init__(self, file: io.BytesIO, *, encoding: str = "bytes") -> None:
        super().__init__(file, encoding=encoding)
        self._file = file

    def load(self) -> Any:
        data = self._file.getvalue()  # no copy: nobody wrote to it
        names = imported_names(data)
        if names is not None and all(_find(name) is not None for name in names):
            plain = _PlainUnpickler(data, self.persistent_load)
            try:
                return plain.load()
            except Exception as error:
                if error is plain.failure:
                    raise
        return cast("Any", super()).load()


_OURS = SimpleNamespace(**{**vars(torchs), "Unpickler": WeightsOnlyUnpickler})


def unpickler_module(stock: Any) -> Any:
    """Return what stands in for `_load`'s `pickle_module`: torch's weights-only one, quicker."""
    return _OURS if stock is torchs and stock.Unpickler is WeightsOnlyUnpickler.__base__ else stock
