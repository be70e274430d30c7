"""Saves to /dev/stdout, a pipe and a file: `FOLDER FORMAT`; what was written comes back."""

from __future__ import annotations

import os
import sys

from support.identity import fast, save, stock
from support.processes import answer

args = sys.argv[1:]
result = {}
kept = os.dup(1)
for side in (stock, fast):
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    with side():
        save("/dev/stdout", args[1])  # 5 KB: the pipe holds them
    os.dup2(kept, 1)
    with os.fdopen(read, "rb") as pipe:
        piped = pipe.read()
    with open(f"{args[0]}/{side.__name__}", "w+b") as out:
        os.dup2(out.fileno(), 1)
        with side():
            save("/dev/stdout", args[1])
        os.dup2(kept, 1)
        redirected = out.read()
    result[side.__name__] = [piped.hex(), redirected.hex()]
answer(result)
