"""A rank of two: Lightning's strategy cannot make a checkpoint's folder. Argument: a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.ranks import join

from fastserial import DistributedError
from fastserial.integrations.lightning_parallel import FastModelParallelStrategy


def main() -> None:
    join()
    folder = Path(sys.argv[1])
    strategy = FastModelParallelStrategy()
    state = {"state_dict": {"w": torch.arange(9.0)}}
    with pytest.raises(DistributedError, match=r"rank 0: .*Not a directory"):
        strategy.save_checkpoint(state, folder / "file" / "below" / "a.ckpt")
    strategy.save_checkpoint(state, folder / "below" / "a.ckpt")
    found = torch.load(folder / "below" / "a.ckpt")
    assert torch.equal(found["state_dict"]["w"], torch.arange(9.0))
    print("done")


main()
