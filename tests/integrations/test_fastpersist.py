"""FastPersist's functions and config: stock's bytes, DeepSpeed's arguments and statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import CASES, MIB, noise
from support.identity import TARGETS, attempt, compare, difference, saver, stock

import fastserial
from fastserial.engines.deepspeed.engine import DeepSpeedEngine
from fastserial.engines.deepspeed.writer_config import FastFileWriterConfig
from fastserial.errors import ConfigError, EngineUnavailableError, WriteError
from fastserial.integrations.fastpersist import (
    fastpersist_save,
    fastpersist_save_legacy,
    get_aio_handle,
    get_pinned_buffer,
)

SAVES = {"zip": fastpersist_save, "legacy": fastpersist_save_legacy}
# Of what DeepSpeed's FastFileWriter prints, and what DeepSpeedExamples' functions return.
DEEPSPEED = {"path", "bytes", "write_secs", "write_GB/s", "aio_bytes", "slow_bytes"}
EXAMPLES = {"write_secs", "total_secs", "total_bytes", "write_GB/s", "total_GB/s"}


@pytest.mark.filterwarnings("ignore")  # as for stock
@pytest.mark.parametrize("fmt", SAVES)
@pytest.mark.parametrize("name", ["checkpoint", "none", "nested_jagged", "raise_value_error"])
def test_stock_bytes_without_install(name: str, fmt: str, tmp_path: Path) -> None:
    """Stock's bytes, or stock's own error: the writer is the one of `test_identity`."""
    case, path = CASES[name], TARGETS["path"]
    live, expected = case.build(), case.raises.get(fmt)
    with stock(), fastserial.options(small_file=0, block_size=65536):
        want = attempt(path, tmp_path / "stock", saver(case, fmt, live), expected)
        got = attempt(path, tmp_path / "ours", lambda f: SAVES[fmt](live, f) and None, expected)
        assert not fastserial.installed()
    compare(want, got, addresses=fmt == "zip" or not case.fresh_storages)


@pytest.mark.parametrize("fmt", SAVES)
def test_statistics(fmt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All names, and numbers that agree with the file."""
    state = {"a": noise(5 * MIB), "b": noise(1000), "c": torch.empty(0)}
    path = tmp_path / "a.pt"
    SAVES[fmt](state, path, show_stats=False)
    assert capsys.readouterr().out == ""
    found = SAVES[fmt](state, path)
    assert capsys.readouterr().out == f"stats = {found}\n"
    size = path.stat().st_size
    assert set(found) == DEEPSPEED | EXAMPLES
    assert found["path"] == str(path)
    assert found["total_bytes"] == found["bytes"] == size
    assert found["aio_bytes"] + found["slow_bytes"] == size  # type: ignore[operator]
    assert 0 < found["write_secs"] <= found["total_secs"]  # type: ignore[operator]
    rate = size / found["total_secs"] / 2**30  # type: ignore[operator]
    assert found["total_GB/s"] == pytest.approx(rate)


@pytest.mark.parametrize("fmt", SAVES)
def test_failure_keeps_the_old_file(fmt: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with pytest.raises(AttributeError, match="local object"):
        SAVES[fmt]([torch.ones(9), lambda: None], path)
    assert path.read_bytes() == b"old"
    with pytest.raises(WriteError):
        SAVES[fmt]([1], tmp_path / "missing" / "a.pt")


def test_number_of_writers_does_not_cut_the_file(tmp_path: Path) -> None:
    """DeepSpeedExamples passes 8 from one process."""
    tensor = torch.arange(1000)
    fastpersist_save_legacy(tensor, tmp_path / "a.pt", num_parallel_writers=8)
    with pytest.raises(ConfigError, match=r"call fastpersist_save\(obj, file_path, group=group\)"):
        fastpersist_save_legacy(tensor, tmp_path / "b.pt", group=object())  # type: ignore[arg-type]
    assert torch.equal(torch.load(tmp_path / "a.pt"), tensor)


def test_gds_says_why_not(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match="GPUDirect"):
        fastpersist_save(noise(12 * MIB), tmp_path / "a.pt", use_gds=True)
    with pytest.raises(EngineUnavailableError, match="GPUDirect"):
        get_pinned_buffer(1, use_gds=True)


def test_writer_in_place_of_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The calls of DeepSpeed's checkpoint engine, by keyword, with its statistics."""
    path = tmp_path / "a.pt"
    state = {"a": noise(3 * MIB), "b": torch.ones(10, dtype=torch.bfloat16)}
    fastserial.install()
    try:
        writer = fastserial.FastFileWriter(
            file_path=str(path), config=FastFileWriterConfig(num_parallel_writers=2, writer_rank=1)
        )
        torch.save(obj=state, f=writer, _use_new_zipfile_serialization=False)
        writer.close()
    finally:
        fastserial.uninstall()
    writer._dump_state()
    assert capsys.readouterr().out == f"stats = {writer.get_stats()}\n"
    assert set(writer.get_stats()) == DEEPSPEED
    assert writer.get_stats()["bytes"] == path.stat().st_size
    assert writer.file_path() == str(path)
    loaded = torch.load(path)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    with pytest.raises(TypeError, match="one target"):
        fastserial.FastFileWriter()
    with pytest.raises(TypeError, match="one target"):
        fastserial.FastFileWriter("a", file_path="b")


# --- with DeepSpeed's op ----------------------------------------------------------------------


@pytest.fixture
def handle() -> Any:
    missing = DeepSpeedEngine.unavailable()
    if missing is not None:
        pytest.skip(missing)
    return get_aio_handle(block_size=MIB, queue_depth=8)


@pytest.mark.parametrize("fmt", SAVES)
def test_with_handle_and_buffer(fmt: str, handle: Any, tmp_path: Path) -> None:
    state = {f"w{i}": noise(1000 * i + 1) for i in range(300)} | {"big": noise(20 * MIB)}
    (tmp_path / "stock").mkdir()
    stock, fast = tmp_path / "stock" / "a.pt", tmp_path / "a.pt"
    torch.save(state, stock, _use_new_zipfile_serialization=fmt == "zip")
    for memory in (None, get_pinned_buffer(8)):
        found = SAVES[fmt](state, fast, handle, memory)
        assert difference(stock.read_bytes(), fast.read_bytes()) is None
        assert found["aio_bytes"] > 20 * MIB  # type: ignore[operator]
        report = fastserial.last_save_report()
        assert report is not None
        assert (report.engine, report.direct, report.fallback) == ("deepspeed", True, None)


def test_two_writers_on_one_handle_and_buffer(handle: Any, tmp_path: Path) -> None:
    """DeepSpeed's writers assert."""
    buffer = get_pinned_buffer(8)
    config = FastFileWriterConfig(handle, buffer)
    data = [noise(10 * MIB).numpy().tobytes() for _ in range(2)]
    writers = [fastserial.FastFileWriter(tmp_path / str(i), config) for i in range(2)]
    for at in range(0, 10 * MIB, MIB):
        for writer, text in zip(writers, data, strict=True):
            writer.write(text[at : at + MIB])
    for writer in writers:
        writer.close()
    for i in range(2):
        assert (tmp_path / str(i)).read_bytes() == data[i]


def test_buffer() -> None:
    buffer = get_pinned_buffer(1)
    assert (buffer.nbytes, buffer.dtype) == (MIB, torch.uint8)
    assert buffer.is_pinned() == torch.cuda.is_available()
    with pytest.raises(ConfigError, match="whole number"):
        get_pinned_buffer(0)
