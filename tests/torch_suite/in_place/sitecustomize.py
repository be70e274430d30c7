"""Ours in place of stock's, in every process that has this on its path: for torch's own tests.

`FASTSERIAL_IN_PLACE`: `installed` installs fastserial; `ours` gives DCP's modules our storage and
planners under stock's names; `stock` changes nothing. With the last two, tests that ask for several
GPUs run on the CPU, and ranks are forked: they need not import.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from typing import Any

from fastserial.import_hook import when_imported

_DCP = "torch.distributed.checkpoint"
_WHO = os.environ.get("FASTSERIAL_IN_PLACE")


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


def _install(torch: Any) -> None:
    """Install fastserial, and tell at the end how often it saved and loaded."""
    import fastserial

    fastserial.install(strict=True, small_file=0)
    atexit.register(_tell_totals)


def _tell_totals() -> None:
    import fastserial

    totals = fastserial.summary()
    with open(os.environ["FASTSERIAL_IN_PLACE_LOG"], "a") as file:
        file.write("saves\n" * totals.saves.count + "loads\n" * totals.loads.count)


if _WHO == "installed":
    when_imported("torch", _install)
else:
    when_imported("torch.testing._internal.common_distributed", _without_gpu_and_import)
if _WHO == "ours":
    when_imported(_DCP, _substitute)
