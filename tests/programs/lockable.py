"""Prints how much of 1 MiB may be locked under a limit: `BYTES`."""

import os
import resource
import sys

from fastserial.engines.deepspeed.aio_op import lockable

resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, int(sys.argv[1])))
if os.getuid() == 0:
    os.setuid(65534)  # root may lock any amount
print(lockable(1 << 20))
