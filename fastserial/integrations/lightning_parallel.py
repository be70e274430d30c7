"""FSDP2 and tensor parallelism in Lightning: one ordinary file, written by all ranks.

    from fastserial.integrations.lightning_parallel import FastModelParallelStrategy

    trainer = Trainer(strategy=FastModelParallelStrategy(), ...)

Lightning is imported with this module: `lightning`, or `pytorch_lightning` if that is in use.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fastserial.config import current
from fastserial.distributed import save
from fastserial.distributed.comm.call import call_of
from fastserial.distributed.comm.group import collective
from fastserial.distributed.save.session import TIMEOUT
from fastserial.files.durable import make_folder
from fastserial.integrations.lightning import TRAINER, local_path, stock_class

__all__ = ["FastModelParallelStrategy"]

_Strategy: Any = stock_class(TRAINER, "strategies.model_parallel", "ModelParallelStrategy")


class FastModelParallelStrategy(_Strategy):  # type: ignore[misc]
    """Lightning's `ModelParallelStrategy(save_distributed_checkpoint=False)`, without its gather.

    The checkpoint has the keys and values that Lightning's would have, and Lightning loads it, with
    either strategy. No rank holds the whole state while it is saved, and the file is durable and
    replaced as a whole. All ranks must see the path.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Make a strategy.

        Args:
            arguments, named: as Lightning's, but `save_distributed_checkpoint`.
        """
        super().__init__(*arguments, **{**named, "save_distributed_checkpoint": False})

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what this rank holds of the model's state."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return what this rank holds of an optimizer's state; parameters by number."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        state = get_optimizer_state_dict(self.model, inner, options=StateDictOptions())
        return FullyShardedDataParallel.rekey_optim_state_dict(
            state, OptimStateKeyType.PARAM_ID, self.model
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, from all ranks. Collective.

        Raises:
            DistributedError: a rank failed; the previous file is intact.
            TypeError: `storage_options` are given; Lightning's strategy refuses them, too.
        """
        path = self.broadcast(filepath)

        def local_for(_: list[Any]) -> str | None:
            local = local_path(path)
            if local is None or storage_options is not None or os.path.isdir(local):
                return None
            make_folder(os.path.dirname(local), current().durable)
            return local

        with collective(None, TIMEOUT, call_of("save_checkpoint", path)) as ranks:
            local = ranks.decide_on_root(None, local_for)  # as rank 0 sees it
        if local is not None:
            save(checkpoint, local)
            return
        whole = tree_map_only(DTensor, self._whole, checkpoint)
        super().save_checkpoint(whole, path, storage_options)

    def _whole(self, tensor: DTensor) -> Any:
        """Gather a tensor, for rank 0."""
        whole = tensor.full_tensor()
        return whole.cpu() if self.is_global_zero else None
