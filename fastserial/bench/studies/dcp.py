"""`fastserial bench dcp`: folders of shards from many ranks, beside stock's settings and fio."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from fastserial.bench.measuring.ranks import run_ranks
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.studies.dcp_balance import balances
from fastserial.bench.studies.dcp_plan import DcpBench, DcpResult, DcpRow
from fastserial.bench.subjects.payload import check_memory

__all__ = ["run_dcp"]

_WORKER = "fastserial.bench.studies.dcp_worker"
_IN_MEMORY = 4  # the state, what it is loaded into, stock's page cache, and its copies
_ON_DISK = 2  # a checkpoint, and the file of one before while it is being freed


def run_dcp(bench: DcpBench, say: Callable[[str], None]) -> DcpResult:
    """Run the benchmark.

    Raises:
        BenchError: too little memory or disk, or a rank failed.
    """
    check_memory(_IN_MEMORY * bench.nbytes)
    rows: list[DcpRow] = []
    with scratch(Path(bench.folder), _ON_DISK * bench.nbytes) as folder:
        argument = json.dumps(asdict(replace(bench, folder=str(folder))))
        for ranks in bench.ranks:
            say(f"saving and loading in turn on {ranks} rank{'s' * (ranks > 1)}")
            rows += [DcpRow(**row) for row in json.loads(run_ranks(_WORKER, argument, ranks))]
    return DcpResult(rows, balances())
