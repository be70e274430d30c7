"""peft: LoRA is merged into the weights for each evaluation, and taken out again."""

from __future__ import annotations

import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel


class Program:
    def __init__(self) -> None:
        config = GPT2Config(vocab_size=200, n_positions=32, n_embd=128, n_layer=2, n_head=2)
        lora = LoraConfig(r=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        self.model: Any = get_peft_model(GPT2LMHeadModel(config), lora)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "best": 9.0}

    def step(self, number: int) -> None:
        if number % 2 == 1:
            self.evaluate()
        self.model.train()
        tokens = torch.randint(200, (4, 32))
        self.optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        self.model.merge_adapter()
        tokens = torch.arange(32).unsqueeze(0)
        loss = self.model(input_ids=tokens, labels=tokens).loss.item()
        time.sleep(0.05)  # an evaluation takes longer
        self.model.unmerge_adapter()
        self.state["best"] = min(self.state["best"], loss)
