"""Prints how many of 8 buffers the deepspeed engine has, and whether they are locked: `LIMIT`."""

import os
import resource
import sys

from fastserial.engines.deepspeed.aio_op import AioSettings, borrow_handle, give_back
from fastserial.engines.deepspeed.engine import DeepSpeedEngine, LockedPool

settings = AioSettings(intra_op_parallelism=1)
give_back(settings, borrow_handle(settings))  # reads files that are root's
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
if os.getuid() == 0:
    os.setuid(65534)
pool = DeepSpeedEngine(4).allocate(8, 256 * 1024)
print(len(pool.buffers), "locked" if isinstance(pool, LockedPool) else "not locked")
sys.stdout.flush()
os._exit(0)
