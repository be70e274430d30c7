"""A training run with a Checkpointer: `training.py FOLDER STEPS [REPORT]`.

Prints each step's loss, exactly; writes the step of each checkpoint that is in place to REPORT.
Started again, it goes on from the newest checkpoint.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from torch import nn

import fastserial


def main() -> None:
    folder, steps = sys.argv[1], int(sys.argv[2])
    told = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    torch.manual_seed(1)
    random.seed(1)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "draws": 0}
    pending: list[tuple[int, fastserial.PendingSave]] = []
    with fastserial.Checkpointer(folder, state, keep=2) as checkpointer:
        start = checkpointer.resume()
        print("start", start, flush=True)
        for step in range(start + 1, steps + 1):
            scale = random.random()
            loss = model(torch.randn(8, 256) * scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state["draws"] += 1
            print(step, loss.item().hex(), state["draws"], flush=True)
            saving = checkpointer.save(step)
            assert saving is not None
            pending.append((step, saving))
            while told is not None and pending and pending[0][1].done():
                at, _ = pending.pop(0)
                told.write_text(str(at))


main()
