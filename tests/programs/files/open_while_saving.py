"""Save over a file that this process has open for reading, with another thread or without."""

import json
import os
import sys
import threading

import torch

import fastserial

folder, alone = sys.argv[1], sys.argv[2] == "1"
path = os.path.join(folder, "a.pt")
torch.save("old", path)
if not alone:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
fastserial.install()
with open(path, "rb") as held:
    torch.save("new", path)
    report = fastserial.last_save_report()
    found = {"fallback": report.fallback, "held": torch.load(held), "there": torch.load(path)}
print(json.dumps(found))
