"""Trains a tiny model with Hugging Face's accelerate, and writes each step's loss to a file.

Arguments: a JSON object; see `OPTIONS`. `kill_in` kills the process (-9) in the middle of the
`save_state` of that number, counted from 1.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from support.kills import kill_in

OPTIONS: dict[str, Any] = {
    "folder": "",
    "safe": True,
    "resume": None,
    "kill_in": 0,
    "losses": "",
}


def main() -> None:
    options = {**OPTIONS, **json.loads(sys.argv[1])}
    torch.set_num_threads(1)
    if options["kill_in"]:
        kill_in(options["kill_in"], "optimizer.bin")
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    start = 0
    if options["resume"]:
        accelerator.load_state(options["resume"])
        start = int(options["resume"].rsplit("-", 1)[1])
    for step in range(start, 8):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = model(x).pow(2).mean() + model(x).mean()
        with open(f"{options['losses']}.{accelerator.process_index}", "a", encoding="utf-8") as out:
            out.write(f"{step} {loss.item()!r}\n")
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        if (step + 1) % 2 == 0:
            folder = f"{options['folder']}/state-{step + 1}"
            accelerator.save_state(folder, safe_serialization=options["safe"])


if __name__ == "__main__":
    main()
