"""Saves that exceed the limit on the size of files: `FOLDER FORMAT`; exceptions come back."""

from __future__ import annotations

import resource
import sys

from support.corpus import noise
from support.identity import fast, raised, save, stock
from support.processes import answer

args = sys.argv[1:]
with fast():  # imports what it needs
    save(args[0] + "/warm.pt", args[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
result, live = [], noise(3_000_000)
for side in (stock, fast):
    for durable in (True, False):
        with side(**({"durable": durable, "small_file": 0} if side is fast else {})):
            error = raised(save, f"{args[0]}/{side.__name__}/a.pt", args[1], live)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        result.append([kinds, getattr(error, "errno", None), str(error)])
answer(result)
