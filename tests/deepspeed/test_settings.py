"""What DeepSpeed's own sections of its config mean where fastserial writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastserial import SaveReport
from fastserial.config import current
from fastserial.engines.deepspeed.engine import DeepSpeedEngine
from fastserial.errors import ConfigError
from fastserial.integrations.deepspeed import (
    FastserialCheckpointEngine,
    _section,
    _take_aio,
    _take_writer,
)
from fastserial.reports import RankReport

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("writer", "options", "unused"),
    [
        (None, {}, []),
        ({"type": "fast", "io_buffer_double": True, "io_multiplier": 1}, {}, []),
        ({"type": "FAST", "data_parallel": "socket"}, {"data_parallel": True}, []),
        ({"type": "python"}, {}, ["type"]),
        (
            {"io_multiplier": 2, "io_buffer_double": False},
            {},
            ["io_multiplier", "io_buffer_double"],
        ),
        ({"io_bufer_size": 1}, {}, ["io_bufer_size"]),
        ({"decoupled": True}, {"overlap": True}, []),
        ({"decoupled": False, "show_statistics": False}, {}, []),
    ],
)
def test_writer(writer: Any, options: dict[str, Any], unused: list[str]) -> None:
    found: dict[str, Any] = {}
    said = _take_writer({"checkpoint": {"writer": writer}}, found)
    assert said == [f"checkpoint.writer.{name}" for name in unused]
    assert found == options


def test_buffer_and_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    block = current().block_size
    writer = {"io_buffer_size": 5 * block + 1, "show_statistics": True}
    options: dict[str, Any] = {}
    assert _take_writer({"checkpoint": {"writer": writer}}, options) == []
    assert options["queue_depth"] == 5
    report = SaveReport(
        path="a.pt",
        container="zip",
        bytes=8,
        seconds=0.5,
        engine="threads",
        direct=False,
        durable=True,
    )
    options["on_report"](report)
    options["on_report"](replace(report, rank=1))  # of the same file
    assert capsys.readouterr().out == f"{report}\n"
    line = RankReport(rank=2, node="a", bytes=8, sent_bytes=0, received_bytes=0, phases={})
    whole = replace(report, rank=2, ranks=(line,))
    options["on_report"](whole)  # of a group without the job's rank 0
    assert capsys.readouterr().out == f"{whole}\n"
    options = {"block_size": MIB, "overlap": False}
    _take_writer({"checkpoint": {"writer": {**writer, "decoupled": True}}}, options)
    assert options.keys() == {"block_size", "overlap", "on_report"}
    assert options["overlap"] is False  # the section of ours has the last word


def test_aio() -> None:
    aio = {"block_size": 2 * MIB, "queue_depth": 16, "intra_op_parallelism": 2, "use_gds": True}
    options: dict[str, Any] = {"engine": "deepspeed"}
    assert _take_aio({"aio": aio}, options) == ["aio.use_gds"]
    made = options["engine"]
    assert made.func is DeepSpeedEngine
    settings = made.keywords["settings"]
    assert (settings.block_size, settings.queue_depth) == (2 * MIB, 16)
    assert options["threads"] == settings.intra_op_parallelism == 2
    assert _take_aio({"aio": aio}, {}) == ["aio"]
    swapped = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    assert _take_aio({"aio": aio, **swapped}, {}) == []


def test_section() -> None:
    for off in (None, False, {"enabled": False, "durable": False}):
        assert _section(off) is None
    assert _section(True) == {}
    assert _section({"enabled": True, "overlap": False}) == {"overlap": False}
    with pytest.raises(ConfigError, match="must be true, false or options"):
        _section(7)
    with pytest.raises(ConfigError, match="unknown option speed"):
        FastserialCheckpointEngine({"speed": 9})
