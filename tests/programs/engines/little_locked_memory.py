"""Prints how many of 8 buffers the deepspeed engine has, or its error: `LIMIT`."""

import os
import resource
import sys

from fastserial.engines.deepspeed.aio_op import AioSettings, borrow_handle, give_back
from fastserial.engines.deepspeed.engine import DeepSpeedEngine
from fastserial.errors import EngineUnavailableError

for handle in [borrow_handle(AioSettings()) for _ in range(2)]:  # reads files that are root's
    give_back(AioSettings(), handle)
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
if os.getuid() == 0:
    os.setuid(65534)
try:
    pool = DeepSpeedEngine(4, settings=AioSettings()).allocate(8, 256 * 1024)
    print(len(pool.buffers))
except EngineUnavailableError as error:
    print(error)
sys.stdout.flush()
os._exit(0)
