"""What the engine `io_uring` says where a filter (seccomp) refuses its calls.

`filtered_io_uring.py CALL ERRNO FOLDER`: prints the reason, and saves with the usual engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from filtered import refuse

import fastserial
from fastserial import engines

name, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
refuse([name], number)
try:
    fastserial.install(engine="io_uring")
except fastserial.EngineUnavailableError as error:
    sys.stdout.write(str(error))
found = {status.name: status.missing for status in engines.survey()}
if found["io_uring"] is None or found["threads"] is not None:
    raise SystemExit(f"the survey says {found}")
fastserial.install()
torch.save(torch.ones(3_000_000), folder / "a.pt")
report = fastserial.last_save_report()
if report is None or report.engine != "threads":
    raise SystemExit(f"saved otherwise: {report}")
