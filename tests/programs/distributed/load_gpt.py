"""A rank: trains a small GPT. Arguments: checkpoint, data ranks, tensor ranks, `save` or `load`.

`save` trains ten steps and saves after five, and once more as stock does, after a gather. `load`
begins with other weights and a new optimizer, loads, and trains the last five. Rank 0 prints the
losses.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from support.gpt import GPT, parallel, train
from support.ranks import join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from fastserial.distributed import load, save


def main() -> None:
    rank, _ = join()
    path, data, tensor, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    model = parallel(GPT(seed=0 if what == "save" else 1), data, tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if what == "save" else 0.5)
    losses: list[float] = []
    step = {"step": 0}
    if what == "save":
        losses = train(model, optimizer, range(5))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        if rank == 0:
            gathered = {"model": model_state, "optimizer": optimizer_state, "step": 5}
            torch.save(gathered, f"{path}.gathered")
        save({"model": model, "optimizer": optimizer, "step": 5}, path)
    else:
        step = {"model": model, "optimizer": optimizer, "step": 0}
        load(path, step)
        assert step["step"] == 5
    losses += train(model, optimizer, range(5, 10))
    print(losses)
    dist.barrier()
    dist.destroy_process_group()


main()
