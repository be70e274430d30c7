"""Saves, and tells at the very end which of fastserial's connections are still there.

One of several ranks.
"""

from __future__ import annotations

import atexit
import sys

import torch
from support.ranks import join

traffics: list[object] = []


def tell() -> None:
    print([vars(one)["_group"] is None for one in traffics], flush=True)


atexit.register(tell)  # before fastserial's own, so it runs after it

from fastserial import distributed  # noqa: E402
from fastserial.distributed.ranks import group  # noqa: E402

join()
distributed.save({"x": torch.ones(10)}, sys.argv[1])
traffics += [one for made in group._made.values() for one in made.values()]
assert not any(vars(one)["_group"] is None for one in traffics)
atexit._run_exitfuncs()
