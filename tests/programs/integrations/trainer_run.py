"""Trains a tiny model with Hugging Face's Trainer, and writes each step's loss to a file.

Arguments: a JSON object; see `OPTIONS`. `kill_in` kills the process (-9) in the middle of the
checkpoint of that number, counted from 1: before `scheduler.pt` is written there.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from support.kills import kill_in
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

OPTIONS: dict[str, Any] = {
    "folder": "",
    "fast": False,
    "safetensors": False,
    "callback": False,
    "resume": False,  # True: from what `resume_from` finds
    "kill_in": 0,
    "losses": "",
}


class Config(PretrainedConfig):
    model_type = "tiny"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 4)
        )
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.layers(x)
        loss = torch.nn.functional.cross_entropy(out, labels)
        return SequenceClassifierOutput(loss=loss, logits=out)


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(16, generator=generator), "labels": index % 4}


class Losses(Trainer):
    path = ""

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        found = super().compute_loss(*arguments, **named)
        loss = found[0] if isinstance(found, tuple) else found
        with open(f"{self.path}.{self.args.process_index}", "a", encoding="utf-8") as file:
            file.write(f"{self.state.global_step} {loss.item()!r}\n")
        return found


def main() -> None:
    options = {**OPTIONS, **json.loads(sys.argv[1])}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(5)
    if options["fast"]:
        import fastserial

        fastserial.install(**({"safetensors": True} if options["safetensors"] else {}))
    if options["kill_in"]:
        kill_in(options["kill_in"], "scheduler.pt")
    callbacks: list[Any] = []
    if options["callback"]:
        from fastserial.integrations.transformers import CheckpointCallback

        callbacks.append(CheckpointCallback())
    args = TrainingArguments(
        output_dir=options["folder"],
        max_steps=8,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
        learning_rate=1e-2,
    )
    trainer = Losses(model=Model(Config()), args=args, train_dataset=Data(), callbacks=callbacks)
    trainer.path = options["losses"]
    resume = None
    if options["resume"]:
        from fastserial.integrations.transformers import resume_from

        resume = resume_from(options["folder"])
        print(resume)
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    main()
