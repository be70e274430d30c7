"""Which tensors a save reaches, and their version counters at that time.

A counter belongs to tensors, not to a storage: a tensor shares it with its views and with what
`detach` returns, and it counts the changes in place that are made through these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastserial.memory.storages import is_plain

_PARTS = ("_indices", "_values")  # of a sparse tensor
_COMPRESSED = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")


class Reached:
    """The tensors that a pickler reached, with their counters.

    Attributes:
        opaque: the storages of one of these tensors are unknown.
    """

    def __init__(self) -> None:
        self.opaque = False
        self._versions: dict[int, list[tuple[torch.Tensor, int]]] = {}  # by storage
        self._unwatched: set[int] = set()

    def note(self, tensor: torch.Tensor) -> None:
        """Record a tensor and its counter."""
        if is_lazy(tensor):  # nothing in it yet
            return
        try:
            if is_plain(tensor):
                self.watch(tensor.untyped_storage()._cdata, tensor)
            else:
                self.leave(storages_of(tensor))
        except (RuntimeError, NotImplementedError):
            self.opaque = True

    def watch(self, storage: int, tensor: torch.Tensor) -> None:
        """Record that a tensor's counter counts changes of a storage, if it has one."""
        try:
            version = tensor._version
        except RuntimeError:  # an inference tensor: a test beforehand would release the GIL
            self.leave([storage])
        else:
            self._versions.setdefault(storage, []).append((tensor, version))

    def leave(self, storages: Iterable[int]) -> None:
        """Record that not all changes of some storages are counted."""
        self._unwatched.update(storages)

    def clear(self) -> None:
        """Forget the tensors."""
        self._versions.clear()

    def versions(self, storage: torch.UntypedStorage) -> list[tuple[torch.Tensor, int]] | None:
        """Return the tensors whose counters show changes of a storage; None if none do.

        It may be shared with another process, or one of its tensors has no counter.
        """
        if self.opaque or storage._cdata in self._unwatched:
            return None
        if storage.is_shared() and storage.device.type == "cpu":
            return None
        return self._versions.get(storage._cdata) if storage.resizable() else None


def storages_of(tensor: Any) -> Iterable[int]:
    """Return the identities of the storages that a tensor is made of.

    Raises:
        RuntimeError: they are unknown.
    """
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]  # no DeviceMesh
        return [found for part in tensors for found in storages_of(part)]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()._cdata]
    names = _PARTS if tensor.layout is torch.sparse_coo else _COMPRESSED
    made_of = (_part(tensor, name) for name in names)
    return [part.untyped_storage()._cdata for part in made_of if part is not None]


def all_storages(values: Iterable[Any]) -> Iterator[int]:
    """Yield the identities of the storages of the tensors among values, as far as known."""
    for value in values:
        if isinstance(value, torch.Tensor):
            # Others are copied in any case; a lazy one has no storage (ValueError).
            with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
                yield from storages_of(value)


def _part(tensor: Any, name: str) -> torch.Tensor | None:
    method: Callable[[], torch.Tensor] = getattr(tensor, name)
    try:
        return method()
    except RuntimeError:  # the other one of the compressed layouts
        return None


@contextlib.contextmanager
def noting(pickle_module: Any, reached: Reached) -> Iterator[Any]:
    """Give a pickle module like another, whose pickler records the tensors that it reaches."""
    target = [reached]  # emptied at the end: a class lives until the garbage collector finds it

    class Pickler(pickle_module.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                target[0].note(obj)
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(obj)

    try:
        yield SimpleNamespace(Pickler=Pickler)
    finally:
        target.clear()
