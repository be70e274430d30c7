"""`fastserial bench onefile`: one file from many ranks, beside fio, a gather, and DCP."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from fastserial.bench.measuring.ranks import run_ranks
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.studies.onefile_plan import OneFileBench, RowResult
from fastserial.bench.subjects.payload import check_memory

__all__ = ["run_onefile"]

_WORKER = "fastserial.bench.studies.onefile_worker"
_COPIES = 2  # of the state on the disk: a folder of DCP and the file made of it
_IN_MEMORY = 3  # the shards, what a gather makes of them, and its page cache


def run_onefile(bench: OneFileBench) -> list[RowResult]:
    """Run the benchmark.

    Raises:
        BenchError: too little memory or disk, or a rank failed.
    """
    check_memory(_IN_MEMORY * bench.nbytes)
    with scratch(Path(bench.folder), _COPIES * bench.nbytes) as folder:
        argument = json.dumps(asdict(replace(bench, folder=str(folder))))
        found = json.loads(run_ranks(_WORKER, argument, bench.ranks))
    return [RowResult(**row) for row in found]
