"""DeepSpeed's own FastFileWriter as `f` of `torch.save`, and ours in its place."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed.io.fast_file_writer as upstream
import pytest
import torch
from deepspeed.io import FastFileWriter, FastFileWriterConfig

import fastserial

MIB = 1 << 20
FORMATS = {"zip": True, "legacy": False}


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    fastserial.install(strict=True)
    yield
    fastserial.uninstall()


@pytest.fixture
def config(make_handle: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Makes DeepSpeed's config, with locked memory."""
    handle = make_handle()
    memory = handle.new_cpu_locked_tensor(MIB, torch.empty(0, dtype=torch.uint8))
    yield lambda **more: FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=memory, **more)
    handle.free_cpu_locked_tensor(memory)


class ByteViews:
    """Stands for the op `UtilsBuilder`."""

    def load(self) -> ByteViews:
        return self

    @staticmethod
    def cast_to_byte_tensor(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the tensors as bytes; a view keeps its tensor's memory."""
        return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]


@pytest.fixture
def buildable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their class, unchanged but for the op that CPU lacks."""
    monkeypatch.setattr(upstream, "UtilsBuilder", ByteViews)


def state(seed: int = 0, nbytes: int = 3 * MIB) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator),
        "bf16": torch.randn(1001, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        **{f"w{i}": torch.randn(i + 1, generator=generator) for i in range(50)},
    }


def their_save(obj: Any, path: Path, config: Any, fmt: str) -> FastFileWriter:
    writer = FastFileWriter(file_path=str(path), config=config)
    torch.save(obj, writer, _use_new_zipfile_serialization=FORMATS[fmt])
    writer.close()
    return writer


def stock_bytes(obj: Any, fmt: str) -> bytes:
    """What stock torch puts into a file object."""
    fastserial.uninstall()
    buffer = io.BytesIO()
    torch.save(obj, buffer, _use_new_zipfile_serialization=FORMATS[fmt])
    fastserial.install()
    return buffer.getvalue()


# --- theirs ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("buildable")
@pytest.mark.parametrize("fmt", FORMATS)
def test_storages_come_in_one_call(
    fmt: str, config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Legacy: all of them. In a zip torch writes them one by one."""
    calls: list[int] = []
    original = FastFileWriter.save_torch_storage_object_list

    def spy(self: Any, storages: Any, save_size: bool) -> Any:
        calls.append(len(storages))
        return original(self, storages, save_size)

    monkeypatch.setattr(FastFileWriter, "save_torch_storage_object_list", spy)
    obj = state()
    their_save(obj, tmp_path / "a.pt", config(), fmt)
    assert calls == ([len(obj)] if fmt == "legacy" else [])


# --- ours in its place ------------------------------------------------------------------------


@pytest.mark.usefixtures("buildable")
@pytest.mark.parametrize("fmt", FORMATS)
def test_our_writer_takes_their_config(
    fmt: str, config: Callable[..., Any], tmp_path: Path
) -> None:
    """The old file replaced as a whole, the same names in the statistics."""
    obj, path = state(nbytes=12 * MIB), tmp_path / "a.pt"  # larger than `small_file`
    path.write_bytes(os.urandom(5 * MIB))
    writer = fastserial.FastFileWriter(file_path=str(path), config=config())
    torch.save(obj, writer, _use_new_zipfile_serialization=FORMATS[fmt])
    assert path.stat().st_size == 5 * MIB
    writer.close()
    assert path.read_bytes() == stock_bytes(obj, fmt)
    report = fastserial.last_save_report()
    assert report is not None
    assert (report.engine, report.direct) == ("deepspeed", True)
    theirs = their_save(obj, tmp_path / "theirs.pt", config(), fmt)
    theirs._dump_state()  # completes the statistics
    assert set(writer.get_stats()) <= set(theirs._stats)
    assert writer.get_stats()["bytes"] == theirs._stats["bytes"]
    assert writer.get_stats()["path"] == str(path)
