"""`fastserial bench deepspeed`: checkpoints of a DeepSpeed run, by stock, by its writer, by us.

The third micro-benchmark of FastPersist (DeepSpeedExamples' `deepspeed_save_model.py`).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fastserial.bench.deepspeed_plan import MARK, DeepSpeedBench, RowResult
from fastserial.bench.errors import BenchError
from fastserial.bench.scratch import scratch

__all__ = ["deepspeed_command", "run_deepspeed"]

_WORKER = "fastserial.bench.deepspeed_worker"
_STDERR_SHOWN = 3000  # characters


def deepspeed_command(
    folder: Annotated[Path, typer.Option(help="Where to write; its disk is what is measured.")],
    model: Annotated[
        str, typer.Option(help="gpt2-tiny … gpt2-xl, phi3, llama-7b, or a folder with a config.")
    ] = "gpt2",
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 1,
    world_size: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Rounds, after one warm-up.")] = 3,
    legacy: Annotated[bool, typer.Option(help="The legacy format instead of zip.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file.")
    ] = None,
) -> None:
    """Save a checkpoint of a DeepSpeed run: stock, DeepSpeed's fast writer, fastserial.

    All rows are durable; times are those of the slowest rank. Exit status 1 if a file differs from
    stock DeepSpeed's.
    """
    from fastserial.console import new_console

    bench = DeepSpeedBench(model, str(folder), zero_stage, world_size, runs, legacy)
    console = new_console()
    with console.status("training one step, then saving"):
        results = run_deepspeed(bench)
    _show(bench, results, console)
    if json_file is not None:
        rows = [
            {name: getattr(result, name) for name in RowResult.__dataclass_fields__}
            for result in results
        ]
        json_file.write_text(json.dumps({"bench": json.loads(bench.to_json()), "rows": rows}))
    raise typer.Exit(int(any(result.identical is False for result in results)))


def run_deepspeed(bench: DeepSpeedBench) -> list[RowResult]:
    """Run the benchmark.

    Raises:
        BenchError: DeepSpeed is missing, or a rank failed.
    """
    from fastserial import engines

    lacks = next(status.missing for status in engines.survey() if status.name == "deepspeed")
    if lacks is not None and "DeepSpeed is not installed" in lacks:
        raise BenchError("DeepSpeed is not installed: pip install 'fastserial[deepspeed]'")
    with scratch(Path(bench.folder), 0) as folder:
        engine = None if lacks is not None else "deepspeed"
        return _launch(replace(bench, folder=str(folder), engine=engine))


def _launch(bench: DeepSpeedBench) -> list[RowResult]:
    command = [sys.executable, "-m", _WORKER, bench.to_json()]
    with tempfile.TemporaryDirectory() as logs:
        names = [os.path.join(logs, str(rank)) for rank in range(bench.world_size)]
        running = []
        port = str(_free_port())
        for rank, name in enumerate(names):
            with open(f"{name}.out", "wb") as out, open(f"{name}.err", "wb") as err:
                environment = _environment(rank, bench.world_size, port)
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        try:
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        for name, code in zip(names, codes, strict=True):
            if code:
                text = Path(f"{name}.err").read_text(errors="replace")
                raise BenchError(
                    f"rank {os.path.basename(name)} ended with {code}: …{text[-_STDERR_SHOWN:]}"
                )
        return _results(Path(f"{names[0]}.out").read_text(errors="replace").splitlines())


def _results(lines: Iterable[str]) -> list[RowResult]:
    for line in lines:
        if line.startswith(MARK):
            return [RowResult(**row) for row in json.loads(line[len(MARK) :])]
    raise BenchError("rank 0 printed no results")


def _environment(rank: int, world: int, port: str) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _show(bench: DeepSpeedBench, results: list[RowResult], console: Any) -> None:
    from rich.table import Table

    from fastserial.bench.machine import this_machine
    from fastserial.bench.units import MB
    from fastserial.report import format_bytes

    console.print(str(this_machine()), soft_wrap=True)
    console.print(
        f"{bench.model}, ZeRO {bench.zero_stage}, {bench.world_size} processes, "
        f"{'legacy' if bench.legacy else 'zip'}; medians of {bench.runs} interleaved runs, all "
        "durable",
        soft_wrap=True,
    )
    table = Table("", "files", "size", "seconds", "MB/s", "× stock", "identical")
    for column in table.columns[1:]:
        column.justify = "right"
    base = statistics.median(results[0].seconds) if results[0].seconds else None
    for result in results:
        if result.problem is not None or not result.seconds:
            table.add_row(result.name, f"[red]{result.problem}[/red]")
            continue
        middle = statistics.median(result.seconds)
        table.add_row(
            result.name,
            str(result.files),
            format_bytes(result.nbytes),
            f"{middle:.2f} ({min(result.seconds):.2f}–{max(result.seconds):.2f})",
            f"{result.nbytes / middle / MB:,.0f}",
            f"{base / middle:.2f}" if base else "–",
            {None: "–", True: "yes", False: "[red]NO[/red]"}[result.identical],
        )
    console.print(table)
