"""What a new user does first: FOLDER. Prints the engine, and that stock torch reads the file."""

from __future__ import annotations

import os
import sys

import torch

import fastserial

path = os.path.join(sys.argv[1], "new.pt")
state = {"weights": torch.randn(8, 1 << 20), "step": 1}
assert fastserial.install()
torch.save(state, path)
report = fastserial.last_save_report()
assert report is not None
print(report.engine)
assert fastserial.uninstall()
assert torch.equal(torch.load(path)["weights"], state["weights"])
print("ok")
