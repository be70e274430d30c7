"""What a rank says of a tensor without sending it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from fastserial.distributed.sharding.flat_shard import FlatShard
from fastserial.distributed.sharding.pieces import Mesh, Specs, TensorSpec, as_dtensor, oddity
from fastserial.errors import LoadMismatchError

__all__ = ["Describer", "LeafSpec"]


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A tensor without its elements.

    Attributes:
        spec: the whole tensor. Of a FlatShard it has the range of this rank only.
        requires_grad: as it is pickled.
        storage: of a plain tensor: number of its storage on this rank, bytes of the storage, and
            the tensor's offset and stride in it (elements). None: a DTensor or a FlatShard.
        is_parameter: of a plain tensor.
        is_buffer: of a plain tensor: it is in the memory of a module's buffer.
    """

    spec: TensorSpec
    requires_grad: bool = False
    storage: tuple[int, int, int, tuple[int, ...]] | None = None
    is_parameter: bool = False
    is_buffer: bool = False

    def likeness(self) -> tuple[Any, ...]:
        """Return what has to be the same on all ranks that have the tensor."""
        held = self.spec.held
        mesh = (held.shape, held.splits) if isinstance(held, Mesh) else type(held)
        view = self.storage[1:] if self.storage is not None else None
        return self.spec.shape, str(self.spec.dtype), mesh, view


class Describer:
    """Describes the tensors of one state."""

    def __init__(self, rank: int, ranks: Mapping[int, int], buffers: Set[int]) -> None:
        """Have met no storage yet.

        Args:
            rank: this rank in the group.
            ranks: the group's rank of each global rank.
            buffers: identities of the storages of modules' buffers.
        """
        self._specs = Specs(rank, ranks)
        self._buffers = buffers
        self._storages: dict[int, int] = {}

    def describe(self, leaf: Any, key: str) -> LeafSpec:
        """Return what there is to say of a tensor.

        Raises:
            LoadMismatchError: no load could fill it, or its placement cannot be in a file.
        """
        if isinstance(leaf, FlatShard):
            return LeafSpec(self._specs.of(leaf, key))
        if as_dtensor(leaf) is not None:
            return LeafSpec(self._specs.of(leaf, key), leaf.requires_grad)
        if (odd := oddity(leaf)) is not None:
            raise LoadMismatchError(f"{key}: {odd}")
        storage = leaf.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        return LeafSpec(
            TensorSpec(tuple(leaf.shape), leaf.dtype),
            leaf.requires_grad,
            (number, storage.nbytes(), leaf.storage_offset(), leaf.stride()),
            isinstance(leaf, torch.nn.Parameter),
            storage._cdata in self._buffers,
        )
