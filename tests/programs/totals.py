"""Saves and loads, and exits: with FASTSERIAL_SUMMARY=1 it tells. Arguments: a folder."""

from __future__ import annotations

import io
import os

import torch
from support.children import answer, arguments

import fastserial

(folder,) = arguments()
fastserial.install()
large = {"x": torch.zeros(4_000_000)}
torch.save(large, f"{folder}/a.pt")
torch.save(large, io.BytesIO())
torch.load(f"{folder}/a.pt")
fastserial.save_async(large, f"{folder}/b.pt")  # nobody waits for it
child = os.fork()
if not child:
    counted = fastserial.summary()
    os._exit(counted.saves.count + counted.loads.count)
answer({"in_child": os.waitpid(child, 0)[1]})
