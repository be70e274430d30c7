"""One file of a DeepSpeed engine: what `zero_to_fp32` and `save_16bit_model` would give.

On CPU with gloo. More settings with FASTSERIAL_DISTRIBUTED=full.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import train
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from said import Launch, having, losses
from support.sharded import same_bytes
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from fastserial import distributed

ONE_FILE = ["--one-file", "--bf16", "--via"]
FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
SAVED, STEPS = 3, 6
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
FP32 = {"bf16": {"enabled": False}}
CASES: list[tuple[int, dict[str, Any], list[str]]] = [
    (1, {}, ["--frozen"]),
    (2, {"zero_optimization": {"round_robin_gradients": True}}, []),
    (3, {"zero_optimization": {"stage3_param_persistence_threshold": 0}}, ["--frozen"]),
]
WRITERS: list[tuple[str | None, list[int]]] = [("machine", [0]), ("socket", [0, 1])]
if FULL:
    WRITERS += [("replica", [0, 1]), (None, [0, 1])]
    CASES += [
        (1, FP32, []),
        (1, FP32_GRADIENTS, []),
        (2, FP32, ["--frozen"]),
        (2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, []),
        (3, FP32, []),
        (3, {"zero_optimization": {"sub_group_size": 200}}, []),
    ]


@pytest.mark.parametrize(("stage", "config", "options"), CASES)
def test_one_file(
    launch: Launch, tmp_path: Path, stage: int, config: dict[str, Any], options: list[str]
) -> None:
    run = [*ONE_FILE, "enable", "--stage", stage, "--config", json.dumps(config), *options]
    said = launch(2, *run, "--save-at", SAVED, "--folder", tmp_path)
    assert len(losses(said)) == 2 * STEPS
    if config is not FP32_GRADIENTS:  # zero_to_fp32 finds "not a zero checkpoint"
        compare_with_zero_to_fp32(tmp_path, stage)
    compare_with_16bit(tmp_path)


def compare_with_zero_to_fp32(folder: Path, stage: int) -> None:
    whole = torch.load(folder / "full.pt")
    weights = torch.load(folder / "weights.pt")
    stock = get_fp32_state_dict_from_zero_checkpoint(str(folder / "stock"))
    lacking = weights.keys() - stock.keys()  # stock forgets frozen parameters under ZeRO 1
    assert lacking == (set() if stage > 1 else {key for key in lacking if "fixed" in key})
    assert stock.keys() <= weights.keys()
    for key, value in stock.items():
        assert same_bytes(weights[key], value), key
        assert same_bytes(whole["module"][key], value), key


def compare_with_16bit(folder: Path) -> None:
    whole = torch.load(folder / "full.pt")["module"]
    weights = torch.load(folder / "weights.pt")
    stock = torch.load(folder / "16bit.pt")
    module = torch.load(folder / "module.pt")
    assert list(stock) == list(module) == list(weights) == list(whole)
    for key, value in stock.items():
        assert same_bytes(module[key], value), key
    for state in (weights, module, whole):
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        train.Model().load_state_dict(state)


def test_plain_torch_goes_on(launch: Launch, tmp_path: Path) -> None:
    """A process without DeepSpeed takes model and optimizer from the file."""
    run = ["--one-file", "--via", "enable", "--stage", 2]
    said = launch(2, *run, "--save-at", SAVED, "--folder", tmp_path)
    for how in ("load", "set"):
        model = train.Model()
        optimizer = torch.optim.AdamW(train.groups_of(model), lr=1.0)
        if how == "load":
            into = {"module": model, "optimizer": optimizer}
            distributed.load(tmp_path / "full.pt", into, strict=False)
        else:
            state = torch.load(tmp_path / "full.pt")
            model.load_state_dict(state["module"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert optimizer.param_groups[1]["weight_decay"] == 0
        for step in range(SAVED, STEPS):
            loss = model(train.batch(step))
            expected = float.fromhex(losses(said)[0, step])
            assert loss.item() == pytest.approx(expected, rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            # DeepSpeed's scheduler: the rate of the step
            for group in optimizer.param_groups:
                group["lr"] = train.rate(step)
            optimizer.step()
        assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS}


@pytest.mark.parametrize(("how", "writers"), WRITERS)
def test_writers_of_fastpersist(
    launch: Launch, tmp_path: Path, how: str | None, writers: list[int]
) -> None:
    """DeepSpeed's section for its own writer says who writes; the file is one, and the same."""
    config: dict[str, Any] = {"fastserial": True, "checkpoint": {}}
    if how is not None:
        config["checkpoint"] = {"writer": {"type": "fast", "data_parallel": how}}
    run = [*ONE_FILE, "config", "--stage", 2, "--config", json.dumps(config), "--large", 300]
    said = launch(2, *run, "--steps", 1, "--save-at", 1, "--folder", tmp_path)
    wrote = having(said, "wrote")[0]["wrote"]
    assert [rank for rank, nbytes in enumerate(wrote) if nbytes] == writers
    assert set(torch.load(tmp_path / "full.pt")) > {"module", "optimizer"}
