"""The identity corpus with its tensors on the GPU, saved and loaded by stock and by fastserial.

A case is brought there by a load of stock's, so that what shares memory still does.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import loading
from support.corpus import Case, name_of, saveable
from support.gpu import DEVICE, need_gpu
from support.identity import TARGETS, both, stock

from fastserial.config import PAST_HOST
from fastserial.engines.gds.memory import missing
from fastserial.memory import buffers as ring_module

need_gpu()
SMALL: dict[str, Any] = {"small_file": 0, "durable": False}
OPTIONS: list[dict[str, Any]] = [
    {},
    {**SMALL, "block_size": 65536, "queue_depth": 3},
    {**SMALL, "direct": False, "transfer": "cpu_cached_gpu"},
    {**SMALL, "transfer": "cpu_gpu"},
]
OPTIONS += [
    {**SMALL, "direct": True, "block_size": 65536, "queue_depth": 3, "transfer": word}
    for word in PAST_HOST
    if missing(word) is None
]
PLACES = [DEVICE, "cuda:0", torch.device(DEVICE), None, "cpu", {"cuda:0": "cpu"}]


RUNNABLE = [(case, fmt) for case, fmt in saveable() if not case.raises]


@pytest.fixture(autouse=True)
def _warned_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cuFile does not serve is said once: here warnings are compared with stock's."""
    monkeypatch.setattr(ring_module, "_warned", set(PAST_HOST))


@pytest.fixture
def on_gpu(tmp_path: Path) -> Any:
    """Return a case's object with its tensors on the GPU, and the file of it."""

    def bring(case: Case, fmt: str) -> tuple[Any, Path]:
        path = tmp_path / "there.pt"
        with warnings.catch_warnings(), stock():
            warnings.simplefilter("ignore")
            with case.context():
                torch.save(case.build(), path, **case.options(fmt))
            try:
                live = torch.load(path, map_location=DEVICE, weights_only=False)
            except (RuntimeError, TypeError, NotImplementedError, SystemError) as error:
                pytest.skip(f"no form of it on a GPU: {error}")
            torch.save(live, path, **case.options(fmt))
        return live, path

    return bring


@pytest.mark.parametrize(("case", "fmt"), RUNNABLE, ids=name_of)
def test_saves(case: Case, fmt: str, on_gpu: Any, tmp_path: Path) -> None:
    live, _ = on_gpu(case, fmt)
    both(case, fmt, TARGETS["path"], tmp_path / "path", *OPTIONS, live=live)
    both(case, fmt, TARGETS["file"], tmp_path / "file", OPTIONS[1], live=live)


@pytest.mark.parametrize(("case", "fmt"), RUNNABLE, ids=name_of)
def test_loads(case: Case, fmt: str, on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = on_gpu(case, fmt)
    with loading.forced(monkeypatch, large=1):
        for place in PLACES:
            loading.both(
                lambda place=place: torch.load(path, map_location=place, weights_only=False),
                *OPTIONS,
                {**SMALL, "verify_on_load": True},
            )
