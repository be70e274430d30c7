"""Replaces a checkpoint every few milliseconds until it is killed. Arguments: path."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time

import torch


def main() -> None:
    path = sys.argv[1]
    for number in itertools.count(1):
        value = float(number % 1000)
        state = {"a": torch.full((300_000,), value), "b": torch.full((300_000,), value)}
        torch.save({**state, "n": number % 1000}, f"{path}.new")
        os.rename(f"{path}.new", path)
        time.sleep(random.uniform(0, 0.05))  # ranks that try again get their turn


main()
