"""Saves where there is no /proc, and prints the report: `FILE`."""

import ctypes
import json
import os
import sys

import torch
from states import check, make

import fastserial

ctypes.CDLL(None).umount2(b"/proc", 2)
assert not os.path.exists("/proc/self")
fastserial.install(on_report=lambda report: print(json.dumps(report.to_dict())))
torch.save(make(1, 9_000_000), sys.argv[1])
assert check(sys.argv[1]) == 1
