"""Install and save where /dev is empty and writable; print whether, and what is in /dev then."""

import ctypes
import os
import sys

import torch

import fastserial

_EMPTY = 77
if ctypes.CDLL(None).mount(b"none", b"/dev", b"tmpfs", 0, None) != 0 or os.listdir("/dev"):
    sys.exit(_EMPTY)
installed = fastserial.install()
torch.save({"a": torch.ones(3)}, os.path.join(sys.argv[1], "f.pt"))
torch.load(os.path.join(sys.argv[1], "f.pt"))
print(installed, os.listdir("/dev"))
