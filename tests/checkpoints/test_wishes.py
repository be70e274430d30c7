"""A wish that is not carried out is said: an error for one call, a warning for an option."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.archives import unusual
from support.corpus import noise, without_crc
from support.identity import digest, fast, last_save, saved, stock, stock_bytes
from support.loading import last_report

import fastserial
from fastserial import reports
from fastserial.errors import ConfigError, CorruptCheckpointError, UnmetOptionWarning
from fastserial.reasons import Reason

VALUE = {"w": noise(50_000), "v": noise(300), "e": torch.empty(0)}
Load = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_unmet", set())


def said(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and its warnings of options."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [str(one.message) for one in caught if one.category is UnmetOptionWarning]


def _behind(data: bytes) -> io.BytesIO:
    file = io.BytesIO(b"head" + data)
    file.seek(4)
    return file


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _opened(path: Path, data: bytes, head: bytes = b"") -> Any:
    file = _file(path, head + data).open("rb")
    file.seek(len(head))
    return file


# How to load a zip, and the arguments.
WAYS: dict[str, tuple[Callable[[Path, bytes], Any], dict[str, Any]]] = {
    "path": (_file, {}),
    "mapped": (_file, {"mmap": True}),
    "bytes": (lambda _, data: io.BytesIO(data), {}),
    "bytes behind others": (lambda _, data: _behind(data), {}),
    "file": (_opened, {}),
    "file, behind others": (partial(_opened, head=b"head"), {}),
    "wrapped": (lambda path, data: io.BufferedReader(io.BytesIO(data)), {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_a_changed_byte_is_found_however_a_zip_is_loaded(
    way: str, installed: bool, explicit: bool, tmp_path: Path
) -> None:
    make, options = WAYS[way]
    data = stock_bytes(VALUE)
    at = data.index(bytes(VALUE["w"].numpy())) + 7
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def load(data: bytes, by: Load = fastserial.load, **wish: Any) -> Any:
        target = make(tmp_path / "x.pt", data)
        with contextlib.nullcontext() if isinstance(target, Path) else target:
            return by(target, **options, **wish)

    def verified(data: bytes) -> Any:
        if explicit:
            return load(data, verify=True)
        with fastserial.options(verify_on_load=True):
            return load(data)

    with stock():
        assert digest(load(data, torch.load)) == digest(VALUE)
        load(damaged, torch.load)  # without a word
    with fast() if installed else stock():
        found, warned = said(lambda: verified(data))
        assert digest(found) == digest(VALUE)
        assert not warned
        assert last_report().verified
        with pytest.raises(CorruptCheckpointError, match="data/0"):
            verified(damaged)


def _legacy(folder: Path) -> Path:
    return saved(folder, VALUE, "legacy")


def _safetensors(folder: Path) -> Path:
    save_file(VALUE, folder / "x.safetensors")
    return folder / "x.safetensors"


def _without_checksums(folder: Path) -> Path:
    with without_crc():
        return saved(folder, VALUE)


UNCHECKED = {
    "legacy": (_legacy, "legacy files have no checksums"),
    "safetensors": (_safetensors, "safetensors files have no checksums"),
    "without": (_without_checksums, "without checksums"),
}


def _into(path: Path, **options: Any) -> Any:
    target = {key: torch.zeros_like(value) for key, value in VALUE.items()}
    fastserial.load_into(target, path, **options)
    return target


@pytest.mark.parametrize("what", UNCHECKED)
@pytest.mark.parametrize("load", [fastserial.load, _into])
def test_what_has_no_checksums_is_not_called_verified(
    what: str, load: Load, tmp_path: Path
) -> None:
    make, why = UNCHECKED[what]
    path = make(tmp_path)
    with stock():
        want = digest(sorted(torch.load(path).items()))
    with pytest.raises(ConfigError, match=why) as caught:
        load(path, verify=True)
    assert str(path) in str(caught.value)
    with fastserial.options(verify_on_load=True):
        found, warned = said(lambda: load(path))
        assert digest(sorted(found.items())) == want
        assert len(warned) == 1
        assert "verify_on_load" in warned[0]
        assert why in warned[0]
        assert said(lambda: load(path))[1] == []  # once
    if (what, load) != ("safetensors", fastserial.load):  # torch has it read by safetensors
        assert not last_report().verified
        assert why in str(last_report().fallback)


def test_torch_load_warns_of_an_option_that_is_not_met(tmp_path: Path) -> None:
    path = _legacy(tmp_path)
    with fast(verify_on_load=True):
        found, warned = said(lambda: torch.load(path))
    assert digest(found) == digest(VALUE)
    assert len(warned) == 1
    assert "not verified" in str(last_report().fallback)


def test_what_only_torch_can_parse_is_not_called_verified(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(unusual()["on disk 1"])
    with stock():
        want = digest(torch.load(path))
    with pytest.raises(ConfigError, match="several parts"):
        fastserial.load(path, verify=True)
    with fastserial.options(verify_on_load=True):
        found, warned = said(lambda: fastserial.load(path))
    assert digest(found) == want
    assert len(warned) == 1


def test_a_tensor_inside_a_pickle_needs_no_checksum_of_its_own(tmp_path: Path) -> None:
    """It is unpickled by a load from memory; the record of the pickle is compared."""
    path = tmp_path / "x.pt"
    with stock():
        torch.save([torch.ones(3), _Inner(torch.ones(3))], path)
    found, warned = said(lambda: fastserial.load(path, verify=True, weights_only=False))
    assert found[1].value.tolist() == [1, 1, 1]
    assert not warned


class _Inner:
    """Holds a legacy checkpoint, as tensors in pickles of other programs do."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return _inner, (stock_bytes(self.value, "legacy"),)


def _inner(data: bytes) -> _Inner:
    return _Inner(torch.load(io.BytesIO(data)))


def test_without_a_patch_only_paths_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastserial.checkpoints import load as checkpoints_load

    monkeypatch.setattr(checkpoints_load, "_function", lambda: torch.load)
    path = saved(tmp_path, VALUE)
    with stock():
        assert digest(fastserial.load(path, verify=True)) == digest(VALUE)
        with pytest.raises(ConfigError, match="no patch"):
            fastserial.load(io.BytesIO(path.read_bytes()), verify=True)
        with pytest.raises(ConfigError, match="no checksums"):
            fastserial.load(_legacy(tmp_path), verify=True)
        with fastserial.options(verify_on_load=True):
            found, warned = said(lambda: fastserial.load(io.BytesIO(stock_bytes(VALUE))))
    assert digest(found) == digest(VALUE)
    assert len(warned) == 1


def test_open_warns_that_it_compares_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, VALUE)

    def read() -> Any:
        with fastserial.open(path) as file:
            return file.get_tensor("w")

    assert said(read)[1] == []
    with fastserial.options(verify_on_load=True):
        found, warned = said(read)
        assert torch.equal(found, VALUE["w"])
        assert len(warned) == 1
        assert "fastserial.verify" in warned[0]


def test_direct_that_cannot_be_direct_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastserial.files import linux
    from fastserial.loading import pump
    from fastserial.saving import extent_writer

    def refuse(*arguments: Any) -> Any:
        return linux.DirectFile(-1, 4096, Reason("no direct I/O in this test"))

    for module in (pump, extent_writer):
        monkeypatch.setattr(module, "open_direct", refuse)
    path = tmp_path / "x.pt"
    with fast(direct=True, small_file=0):
        _, warned = said(lambda: torch.save(VALUE, path))
        assert warned == ["direct=True has no effect here: no direct I/O in this test"]
        assert "no direct I/O in this test" in str(last_save().fallback)
        monkeypatch.setattr(reports, "_unmet", set())
        found, warned = said(lambda: torch.load(path))
        assert warned == ["direct=True has no effect here: no direct I/O in this test"]
    assert digest(found) == digest(VALUE)


def test_the_report_says_why_a_save_was_not_synced_or_cloned(tmp_path: Path) -> None:
    """Neither is an error: files are synced by default, and a clone only saves bytes."""
    with fast():
        with open(tmp_path / "file.pt", "wb") as file:
            torch.save(VALUE, file)
        assert not last_save().durable
        assert "file object" in last_save().durable_why
        assert "file object" in str(last_save())
        torch.save(VALUE, tmp_path / "path.pt")
        assert last_save().durable
        assert not last_save().durable_why
        with fastserial.options(durable=False):
            torch.save(VALUE, tmp_path / "path.pt")
        assert not last_save().durable
        assert not last_save().durable_why
        fastserial.save(VALUE, tmp_path / "x.pt", base=tmp_path / "missing.pt")
        assert "the base cannot be read" in str(last_save().fallback)


def test_direct_is_said_of_what_torch_writes_or_reads(tmp_path: Path) -> None:
    with fast(direct=True):
        target = io.BytesIO()
        _, warned = said(lambda: torch.save(VALUE, target))
        assert len(warned) == 1
        assert "torch writes" in warned[0]
        path = _legacy(tmp_path)
    with fast(direct=True):
        _, warned = said(lambda: torch.load(path))
    assert warned == ["direct=True has no effect here: the legacy container"]
