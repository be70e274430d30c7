"""Print the modules of fastserial that the first loads import, after `install()`.

python first_load.py PATH...
"""

from __future__ import annotations

import sys

import torch

import fastserial

fastserial.install()
before = set(sys.modules)
for path in sys.argv[1:]:
    torch.load(path)
print(*sorted(name for name in set(sys.modules) - before if name.startswith("fastserial")))
