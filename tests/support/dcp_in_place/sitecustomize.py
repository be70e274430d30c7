"""Our storage and planners under stock's names, in every process that has this on its path.

For torch's own tests of DCP. `FASTSERIAL_IN_PLACE`: `ours`; `stock` changes nothing of DCP. With
both, tests that ask for several GPUs run on the CPU, and ranks are forked: they need not import.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from fastserial.import_hook import when_imported

_DCP = "torch.distributed.checkpoint"
_OURS = os.environ.get("FASTSERIAL_IN_PLACE") == "ours"


def _without_gpu_and_import(module: Any) -> None:
    module.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    forked = multiprocessing.get_context("fork").Process
    module.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(forked)


def _substitute(dcp: Any) -> None:
    """Give each module that names stock's classes ours."""
    import in_place
    from torch.distributed.checkpoint import (
        _storage_utils,
        default_planner,
        filesystem,
        state_dict_loader,
        state_dict_saver,
    )

    for module in (
        dcp, _storage_utils, default_planner, filesystem, state_dict_loader, state_dict_saver,
    ):  # fmt: skip
        for name in in_place.__all__:
            if hasattr(module, name):
                setattr(module, name, getattr(in_place, name))


when_imported("torch.testing._internal.common_distributed", _without_gpu_and_import)
if _OURS:
    when_imported(_DCP, _substitute)
