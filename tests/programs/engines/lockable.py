"""Prints whether 12 KiB, and whether 16 KiB may be locked under a hard limit: `BYTES`."""

import os
import resource
import sys

from fastserial.engines.deepspeed.locked_memory import may_lock

resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, int(sys.argv[1])))
if os.getuid() == 0:
    os.setuid(65534)  # root may lock any amount
print(may_lock(12 << 10), may_lock(16 << 10))
