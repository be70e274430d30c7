"""A tensor that only some ranks have, as all ranks know it (`merge="union"`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fastserial.distributed.sharding.pieces import Mesh

__all__ = ["Described", "Joined"]


@dataclass(frozen=True, slots=True)
class Described:
    """What a rank tells of one of its tensors.

    Attributes:
        kind: `plain`, `flat` (a FlatShard) or `mesh` (a DTensor).
        shape, dtype: of the whole.
        requires_grad: as it is pickled.
        mesh: of a DTensor.
        storage: of a plain tensor: number of its storage on that rank, bytes, and the tensor's
            offset and stride in it.
        is_parameter: of a plain tensor.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    mesh: Mesh | None = None
    storage: tuple[int, int, int, tuple[int, ...]] | None = None
    is_parameter: bool = False

    def likeness(self) -> tuple[Any, ...]:
        """Return what has to be the same on all ranks that have the tensor."""
        mesh = (self.mesh.shape, self.mesh.splits) if self.mesh is not None else None
        view = self.storage[1:] if self.storage is not None else None
        return self.kind, self.shape, str(self.dtype), mesh, view


@dataclass(slots=True, eq=False)
class Joined:
    """A tensor of a merged state.

    Attributes:
        told: by the first rank that has it.
        ranks: that have it.
        grids: of the meshes on which they have it.
        leaf: what this rank has, if it does.
    """

    told: Described
    ranks: list[int]
    grids: list[tuple[int, ...]] = field(default_factory=list)
    leaf: Any = None
