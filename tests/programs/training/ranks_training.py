"""A rank of a training run with a Checkpointer: `FOLDER KIND STEPS EVERY [FLAGS [REPORT]]`.

Prints each step's loss, exactly. A byte of FLAGS for each rank tells that it is in a save; rank 0
writes the step of each checkpoint that is in place to REPORT. Started again, it goes on from the
newest checkpoint. On SIGUSR1 to any rank all of them save and stop.
"""

from __future__ import annotations

import mmap
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from support.sharded import parallel
from torch import nn

import fastserial

WIDTH = 520  # a weight has more than 1 MiB: every rank writes a part of it


def in_order(count, bucket):  # torch looks at annotations, and takes no strings
    """Add gradients in the order of the ranks.

    DDP lays its buckets out anew after its first step, and a ring then adds in another order.
    """
    parts = [torch.empty_like(bucket.buffer()) for _ in range(count)]
    dist.all_gather(parts, bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(torch.stack(parts).sum(0) / count)
    return done


def made(kind: str, count: int) -> nn.Module:
    torch.manual_seed(1)
    model: Any = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)
    )
    if kind == "fsdp":
        model[1] = nn.LayerNorm(WIDTH)  # the buffers of BatchNorm would be each rank's own
    model = parallel(model, kind, model[0], model[3])
    if kind == "ddp":
        model.register_comm_hook(count, in_order)
    return model


def main() -> None:
    rank, count = join()
    folder, kind, steps, every = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    flags: Any = bytearray(count)
    if len(sys.argv) > 5:
        with Path(sys.argv[5]).open("r+b") as file:
            flags = mmap.mmap(file.fileno(), count)
    told = Path(sys.argv[6]) if len(sys.argv) > 6 and rank == 0 else None
    torch.set_num_threads(1)
    model = made(kind, count)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "draws": 0}
    pending: list[tuple[int, fastserial.PendingSave]] = []

    def over(report: fastserial.SaveReport) -> None:
        flags[rank] = 0

    with (
        fastserial.options(on_report=over, durable=False),
        fastserial.Checkpointer(folder, state, keep=2, every=every, timeout=60) as checkpointer,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always", RuntimeWarning)
        checkpointer.save_on(signal.SIGUSR1)
        start = checkpointer.resume()
        print("start", start, *[str(warning.message) for warning in warned], flush=True)
        for step in range(start + 1, steps + 1):
            scale = random.random()
            loss = model(torch.randn(8, WIDTH) * scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state["draws"] += 1
            print(step, loss.item().hex(), state["draws"], flush=True)
            flags[rank] = 1
            saving = checkpointer.save(step)
            if saving is None:
                flags[rank] = 0
            else:
                pending.append((step, saving))
            while told is not None and pending and pending[0][1].done():
                at, _ = pending.pop(0)
                told.write_text(str(at))
            if checkpointer.stop_requested:
                assert saving is not None
                assert saving.done()
                print("stopped", step)
                break
    dist.barrier()


main()
