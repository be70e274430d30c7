"""A range of a flattened parameter, as ZeRO and other distributed optimizers keep their shards."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """What this rank holds of a tensor: a range of its elements in row-major order.

        part = torch.ones(6)  # what this rank has of a 2 x 3 weight: all of it
        shard = distributed.FlatShard((2, 3), torch.float32, 0, 6, part)
        distributed.save({"weight": shard}, "flat.pt")

    In a file it is the whole tensor, of shape `param_shape`; the ranks' ranges have to cover it.

    Attributes:
        param_shape: shape of the whole tensor.
        dtype: of its elements.
        start: first element that this rank holds.
        length: how many elements; 0 if this rank holds none.
        tensor: they, one-dimensional.
    """

    param_shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    length: int
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: they do not fit each other.
        """
        object.__setattr__(self, "param_shape", tuple(map(int, self.param_shape)))
        self.check()

    def check(self) -> None:
        """Check the values, which `tensor.data = ...` may have changed.

        Raises:
            ValueError: they do not fit each other.
        """
        whole = prod(self.param_shape)
        if min(self.start, self.length) < 0 or self.start + self.length > whole:
            raise ValueError(
                f"elements {self.start} to {self.start + self.length} do not lie in a tensor of "
                f"shape {self.param_shape}, which has {whole}"
            )
        if self.tensor.dim() != 1 or self.tensor.numel() != self.length:
            raise ValueError(
                f"the tensor of a FlatShard of length {self.length} has to be one-dimensional with "
                f"as many elements; its shape is {tuple(self.tensor.shape)}"
            )
        if self.tensor.dtype != self.dtype:
            raise ValueError(f"the tensor is {self.tensor.dtype}, the FlatShard {self.dtype}")
