"""`fastserial bench deepspeed`: checkpoints of a DeepSpeed run, by stock, by its writer, by us.

The third micro-benchmark of FastPersist (DeepSpeedExamples' `deepspeed_save_model.py`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.ranks import run_ranks
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.studies.deepspeed_plan import DeepSpeedBench, RowResult

__all__ = ["run_deepspeed"]

_WORKER = "fastserial.bench.studies.deepspeed_worker"


def run_deepspeed(bench: DeepSpeedBench) -> list[RowResult]:
    """Run the benchmark.

    Raises:
        BenchError: DeepSpeed is missing, or a rank failed.
    """
    from fastserial import engines

    lacks = next(status.missing for status in engines.survey() if status.name == "deepspeed")
    if lacks is not None and "DeepSpeed is not installed" in lacks:
        raise BenchError("DeepSpeed is not installed: pip install deepspeed")
    with scratch(Path(bench.folder), 0) as folder:
        engine = None if lacks is not None else "deepspeed"
        argument = json.dumps(asdict(replace(bench, folder=str(folder), engine=engine)))
        found = json.loads(run_ranks(_WORKER, argument, bench.world_size))
    return [RowResult(**row) for row in found]
