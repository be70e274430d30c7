"""The op that DeepSpeed's own writer needs and CPU lacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ByteViews:
    """Stands for the op `UtilsBuilder`."""

    def load(self) -> ByteViews:
        return self

    @staticmethod
    def cast_to_byte_tensor(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the tensors as bytes; a view keeps its tensor's memory."""
        return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
