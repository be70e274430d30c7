"""Trains a tiny model with Lightning, and writes each step's loss to a file.

Arguments: a JSON object; see `OPTIONS`. `kill_in` kills the process (-9) in the middle of the save
of that number, counted from 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

OPTIONS: dict[str, Any] = {
    "folder": "",
    "io": "stock",  # stock, fast, async
    "resume": None,
    "kill_in": 0,
    "devices": 1,
    "strategy": "auto",  # or "fsdp2": FSDP2 and one file; with io "fast" from all ranks
    "losses": "",
}


class Model(pl.LightningModule):
    def __init__(self, losses: str) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 256),
            torch.nn.BatchNorm1d(256),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(256, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 4),
        )
        self.losses = losses

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for layer in (self.layers[0], self.layers[3]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        # Lightning begins its data anew when it resumes: they are of the step, not of the loader
        generator = torch.Generator().manual_seed(self.global_step * 7 + self.global_rank)
        x = torch.randn(8, 16, generator=generator)
        loss = self.layers(x).pow(2).mean() + self.layers(x).mean()
        self.log("loss", loss)
        with open(f"{self.losses}.{self.global_rank}", "a", encoding="utf-8") as file:
            file.write(f"{self.global_step} {loss.item()!r}\n")
        return loss

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        torch.manual_seed(self.global_step * 7 + self.global_rank)  # Lightning does not save it

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def plugin(kind: str) -> Any:
    if kind == "stock":
        return None
    from fastserial.integrations.lightning import FastAsyncCheckpointIO, FastCheckpointIO

    return FastCheckpointIO() if kind == "fast" else FastAsyncCheckpointIO()


def strategy(kind: str, io: str) -> Any:
    if kind != "fsdp2":
        return kind
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    if io == "stock":
        return ModelParallelStrategy(save_distributed_checkpoint=False, **sizes)
    from fastserial.integrations.lightning_parallel import FastModelParallelStrategy

    return FastModelParallelStrategy(**sizes)


def kill_in(number: int, kind: str) -> None:
    """Kill this process in its save of that number: the bytes are written, the name is not."""
    count = 0

    def hit() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    if kind.startswith("stock"):
        from fsspec.implementations import local

        move = local.shutil.move

        def moved(*arguments: Any, **named: Any) -> Any:
            hit()
            return move(*arguments, **named)

        local.shutil.move = moved
    else:
        from fastserial.files.destination import Replacement

        sync = Replacement.sync

        def synced(new: Replacement) -> None:
            sync(new)
            hit()

        Replacement.sync = synced


def main() -> None:
    options = {**OPTIONS, **json.loads(sys.argv[1])}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    if options["kill_in"]:
        kill_in(options["kill_in"], options["io"])
    saving = ModelCheckpoint(
        dirpath=options["folder"],
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=2,
        every_n_train_steps=2,
    )
    found = plugin(options["io"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options["devices"],
        strategy=strategy(options["strategy"], options["io"]),
        max_steps=12,
        max_epochs=-1,
        plugins=[found] if found is not None else None,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(200)))
    model = Model(options["losses"])
    trainer.fit(model, loader, ckpt_path=options["resume"], weights_only=False)


if __name__ == "__main__":
    main()
