"""One file of a DeepSpeed engine: what `zero_to_fp32` and `save_16bit_model` would give.

On CPU with gloo. `full.py` is what ranks run; more settings with FASTSERIAL_DISTRIBUTED=full.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from said import Said, check_exit, having, losses
from support.sharded import same_bytes
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from fastserial import distributed

Launch = Callable[..., Said]
PROGRAM = "full.py"
FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
SAVED, STEPS = 3, 6
BF16 = {"bf16": {"enabled": True}}
FP32_GRADIENTS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
CASES: list[tuple[int, dict[str, Any], list[str]]] = [
    (1, BF16, ["--frozen"]),
    (2, {**BF16, "zero_optimization": {"round_robin_gradients": True}}, []),
    (3, {**BF16, "zero_optimization": {"stage3_param_persistence_threshold": 0}}, ["--frozen"]),
]
WRITERS: list[tuple[str | None, list[int]]] = [("machine", [0]), ("socket", [0, 1])]
if FULL:
    WRITERS += [("replica", [0, 1]), (None, [0, 1])]
    CASES += [
        (1, {}, []),
        (1, FP32_GRADIENTS, []),
        (2, {}, ["--frozen"]),
        (2, {**BF16, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, []),
        (3, {}, []),
        (3, {**BF16, "zero_optimization": {"sub_group_size": 200}}, []),
    ]


@pytest.mark.parametrize(("stage", "config", "options"), CASES)
def test_one_file(
    launch: Launch, tmp_path: Path, stage: int, config: dict[str, Any], options: list[str]
) -> None:
    run: list[Any] = ["--stage", stage, "--config", json.dumps(config), *options]
    said = launch(2, *run, "--save-at", SAVED, "--folder", tmp_path, program=PROGRAM)
    check_exit(said)
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
        full.Model(frozen=False).load_state_dict(state)


def test_plain_torch_goes_on(launch: Launch, tmp_path: Path) -> None:
    """A process without DeepSpeed takes model and optimizer from the file."""
    said = launch(2, "--stage", 2, "--save-at", SAVED, "--folder", tmp_path, program=PROGRAM)
    check_exit(said)
    for how in ("load", "set"):
        model = full.Model(frozen=False)
        optimizer = torch.optim.AdamW(full.groups_of(model), lr=1.0)
        if how == "load":
            into = {"module": model, "optimizer": optimizer}
            distributed.load(tmp_path / "full.pt", into, strict=False)
        else:
            state = torch.load(tmp_path / "full.pt")
            model.load_state_dict(state["module"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert optimizer.param_groups[1]["weight_decay"] == 0
        for step in range(SAVED, STEPS):
            loss = model(full.batch(step))
            expected = float.fromhex(losses(said)[0, step])
            assert loss.item() == pytest.approx(expected, rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            # DeepSpeed's scheduler: the rate of the step
            for group in optimizer.param_groups:
                group["lr"] = full.rate(step)
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
    options = ["--stage", 2, "--config", json.dumps(config), "--by-config", "--large"]
    said = launch(2, *options, "--steps", 1, "--save-at", 1, "--folder", tmp_path, program=PROGRAM)
    check_exit(said)
    wrote = having(said, "saved")[0]["wrote"]
    assert [rank for rank, nbytes in enumerate(wrote) if nbytes] == writers
    assert set(torch.load(tmp_path / "full.pt")) > {"module", "optimizer"}
