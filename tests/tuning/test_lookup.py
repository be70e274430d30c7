"""Tuned settings: where they are kept, which device they are for, and which saves use them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastserial
from fastserial import engines
from fastserial.config import Config
from fastserial.diagnosis.examine import examine
from fastserial.engines.null import NullEngine
from fastserial.errors import ConfigError, EngineUnavailableError
from fastserial.files import device_id
from fastserial.files.device_id import device_key
from fastserial.saving.writer import FastFileWriter
from fastserial.tuning import lookup, store
from fastserial.tuning.store import Entry, Settings

TUNED = Settings("threads", 256 * 1024, 3, 2)
STATE = {"a": torch.arange(1_500_000), "b": torch.zeros(3)}
DEFAULT = Config()


@pytest.fixture(autouse=True)
def _fresh(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    for name in [name for name in os.environ if name.startswith("FASTSERIAL")]:
        monkeypatch.delenv(name)
    lookup.forget_cache()
    fastserial.install(strict=True)
    yield
    fastserial.install()
    fastserial.uninstall()
    lookup.forget_cache()


def entry(settings: Settings | None = TUNED, **more: Any) -> Entry:
    values: dict[str, Any] = {
        "folder": "/data", "device": "a disk", "gain": 1.2, "pairs": 9, "nbytes": 1 << 30,
        "when": "2026-01-02T03:04:05+00:00", "fastserial": "0.1.0",
    }  # fmt: skip
    return Entry(settings, **{**values, **more})


def key_of(folder: Path) -> str:
    return lookup.entry_for(folder)[0]


def keep(folder: Path, settings: Settings | None = TUNED) -> None:
    store.remember(key_of(folder), entry(settings))
    lookup.forget_cache()


def saved(path: Path, state: object = STATE, legacy: bool = False) -> tuple[str, int, int, int]:
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    report = fastserial.last_save_report()
    assert report is not None
    assert report.path == str(path)
    return report.engine, report.block_size, report.queue_depth, report.threads


# --- the file ---------------------------------------------------------------------------------


def test_file_of_entries() -> None:
    assert store.read() == {}
    assert not store.forget("one")
    store.remember("one", entry())
    store.remember("two", entry(None, gain=None))
    store.remember("one", entry(gain=1.5))
    assert store.read() == {"one": entry(gain=1.5), "two": entry(None, gain=None)}
    assert store.forget("one")
    assert not store.forget("one")
    assert list(store.read()) == ["two"]
    assert [file.name for file in store.location().parent.iterdir()] == ["tuned.json"]


def test_location(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert store.location() == tmp_path / "fastserial" / "tuned.json"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CONFIG_HOME", unusable)
        assert store.location() == tmp_path / "home/.config/fastserial/tuned.json"


DAMAGED = [
    "",
    "[]",
    "{}",
    '{"version": 99, "devices": {}}',
    '{"version": 1, "devices": {"KEY": {}}}',
    '{"version": 1, "devices": {"KEY": {"settings": {"engine": "threads"}}}}',
]


def damage(text: str, folder: Path) -> None:
    path = store.location()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("KEY", key_of(folder)))
    lookup.forget_cache()


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_file_is_told_of_once_and_fails_nothing(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(text, tmp_path)
    with caplog.at_level(logging.WARNING, "fastserial"):
        for turn in range(3):
            assert saved(tmp_path / f"{turn}.pt")[1] == DEFAULT.block_size
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "tuned settings are not used"
    ]
    with pytest.raises(ConfigError, match=r"tuned\.json"):
        store.read()
    found = examine(tmp_path)
    assert any("tuned settings are not used" in finding.text for finding in found.findings)
    store.remember("key", entry())  # tuning again mends it
    assert store.read() == {"key": entry()}


@pytest.mark.parametrize(
    "change", [{"block_size": 1000}, {"threads": 0}, {"queue_depth": "6"}, {"engine": 3}, {"x": 1}]
)
def test_impossible_settings_are_not_used(change: dict[str, Any], tmp_path: Path) -> None:
    keep(tmp_path)
    path = store.location()
    content = json.loads(path.read_text())
    content["devices"][key_of(tmp_path)]["settings"].update(change)
    path.write_text(json.dumps(content))
    lookup.forget_cache()
    assert saved(tmp_path / "a.pt")[1] == DEFAULT.block_size


def test_unreadable_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert saved(tmp_path / "a.pt")[1] == DEFAULT.block_size


# --- which saves use them ---------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_saves_use_them_and_write_the_same_bytes(tmp_path: Path, legacy: bool) -> None:
    plain = tmp_path / "a.1"
    assert saved(plain, legacy=legacy)[1] == DEFAULT.block_size
    keep(tmp_path)
    assert saved(tmp_path / "a.2", legacy=legacy) == ("threads", 256 * 1024, 3, 2)
    assert (tmp_path / "a.2").read_bytes() == plain.read_bytes()


def test_large_pickle_in_a_legacy_file(tmp_path: Path) -> None:
    """torch writes it before it hands the storages over."""
    keep(tmp_path)
    state = {**STATE, "text": "x" * 200_000}
    assert saved(tmp_path / "a.pt", state, legacy=True)[1] == TUNED.block_size
    fastserial.uninstall()
    assert torch.load(tmp_path / "a.pt")["text"] == state["text"]


def test_writer_used_as_a_file(tmp_path: Path) -> None:
    keep(tmp_path)
    data = os.urandom(3_000_001)
    with FastFileWriter(tmp_path / "raw") as writer:
        for start in range(0, len(data), 10_000):
            writer.write(data[start : start + 10_000])
    assert (tmp_path / "raw").read_bytes() == data
    assert writer.report is not None
    assert writer.report.block_size == TUNED.block_size
    with (tmp_path / "file").open("wb") as file, FastFileWriter(file) as writer:
        writer.write(b"head" * 20)
        writer.write(data)
    assert (tmp_path / "file").read_bytes() == b"head" * 20 + data
    assert writer.report is not None
    assert writer.report.block_size == TUNED.block_size


def test_small_files_do_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("looked up")

    monkeypatch.setattr(lookup, "applied", refuse)
    for count in (1000, 16384):  # the second is as much as storages are copied together
        for use_zip in (True, False):
            state = {"a": torch.zeros(count)}
            torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=use_zip)


def test_nearer_options_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path)
    path = tmp_path / "a.pt"
    monkeypatch.setenv("FASTSERIAL_THREADS", "3")
    assert saved(path) == ("threads", TUNED.block_size, TUNED.queue_depth, 3)
    fastserial.install(threads=4)
    assert saved(path)[3] == 4
    with fastserial.options(threads=5):
        assert saved(path) == ("threads", TUNED.block_size, TUNED.queue_depth, 5)


def test_memory_is_never_mixed(tmp_path: Path) -> None:
    """A block size of the user's times a tuned queue depth could be any amount of memory."""
    keep(tmp_path)
    with fastserial.options(block_size=1 << 20):
        assert saved(tmp_path / "a.pt") == ("threads", 1 << 20, DEFAULT.queue_depth, TUNED.threads)
    with fastserial.options(engine=NullEngine):
        assert saved(tmp_path / "b.pt")[1:] == (DEFAULT.block_size, DEFAULT.queue_depth, 6)


def test_given_options_stand_as_they_are(tmp_path: Path) -> None:
    keep(tmp_path)
    with FastFileWriter(tmp_path / "a", Config()) as writer:
        writer.write(bytes(2_000_000))
    assert writer.report is not None
    assert writer.report.block_size == DEFAULT.block_size


def test_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path)
    monkeypatch.setenv("FASTSERIAL_TUNED", "0")
    assert saved(tmp_path / "a.pt")[1] == DEFAULT.block_size
    with fastserial.options(tuned=True):
        assert saved(tmp_path / "a.pt")[1] == TUNED.block_size
    monkeypatch.delenv("FASTSERIAL_TUNED")
    fastserial.install(tuned=False)
    assert saved(tmp_path / "a.pt")[1] == DEFAULT.block_size


def test_other_devices_and_kept_defaults(tmp_path: Path) -> None:
    store.remember("another device", entry())
    assert saved(tmp_path / "a.pt")[1] == DEFAULT.block_size
    keep(tmp_path, None)
    assert saved(tmp_path / "a.pt")[1] == DEFAULT.block_size
    assert lookup.sources_for(tmp_path) == frozenset()


def test_one_look_per_process_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path)
    calls: list[str] = []
    for module, name in ((store, "read"), (device_id, "device_key")):
        function = getattr(module, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, counted)
    for turn in range(3):
        assert saved(tmp_path / f"{turn}.pt")[1] == TUNED.block_size
    assert calls == ["read", "device_key"]


def test_engine_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path, Settings("gone", 1 << 20, 2, 2))
    with caplog.at_level(logging.WARNING, "fastserial"):
        assert saved(tmp_path / "a.pt") == ("threads", 2 << 20, 6, 6)
    assert "'gone'" in caplog.text


def test_engine_that_writes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path, Settings("null", 1 << 20, 2, 2))
    with caplog.at_level(logging.WARNING, "fastserial"):
        assert saved(tmp_path / "a.pt")[0] == "threads"
    assert "writes no data" in caplog.text


def test_engine_that_fails_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that may not be locked shows only when it is asked for."""

    class Picky(engines.load("threads")):  # type: ignore[misc]
        name = "picky"

        def allocate(self, count: int, nbytes: int) -> Any:
            raise EngineUnavailableError("not enough locked memory")

    monkeypatch.setattr(
        engines, "load", lambda name, load=engines.load: Picky if name == "picky" else load(name)
    )
    keep(tmp_path, Settings("picky", 256 * 1024, 2, 2))
    with caplog.at_level(logging.WARNING, "fastserial"):
        assert saved(tmp_path / "a.pt")[0] == "threads"
    assert "not enough locked memory" in caplog.text
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], STATE["a"])
    with fastserial.options(engine="picky"), pytest.raises(EngineUnavailableError):
        saved(tmp_path / "b.pt")


# --- what shows them --------------------------------------------------------------------------


def test_doctor_shows_them(tmp_path: Path) -> None:
    keep(tmp_path)
    with fastserial.options(threads=9):
        found = examine(tmp_path)
    options = {option.name: (option.value, option.source) for option in found.options}
    assert options["block_size"] == (TUNED.block_size, "tune")
    assert options["threads"] == (9, "options()")
    assert options["durable"] == (True, "default")
    assert found.tuned == entry()
    without = {option.name: option.source for option in examine().options}
    assert without["block_size"] == "default"


def test_config_for_a_folder(tmp_path: Path) -> None:
    keep(tmp_path)
    assert Settings.of(lookup.config_for(tmp_path)) == TUNED
    with fastserial.options(tuned=False):
        assert Settings.of(lookup.config_for(tmp_path)) == Settings.of(DEFAULT)
        assert lookup.sources_for(tmp_path) == frozenset()


# --- the device -------------------------------------------------------------------------------


def test_one_key_per_file_system(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert key_of(tmp_path) == key_of(below)
    if os.stat("/proc").st_dev != os.stat(tmp_path).st_dev:
        assert key_of(Path("/proc")) != key_of(tmp_path)


@pytest.fixture
def block_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "sys"
    root.mkdir()
    monkeypatch.setattr(device_id, "_BLOCK_DEVICES", root)
    monkeypatch.setattr(device_id, "_uuid", lambda fd: None)
    return root


def key_of_root() -> str:
    fd = os.open("/", os.O_RDONLY)
    try:
        return device_key(fd).partition(" ")[2]
    finally:
        os.close(fd)


def test_key_of_a_disk(block_devices: Path) -> None:
    number = os.stat("/").st_dev
    disk = block_devices / "real" / "sda"
    part = disk / "sda2"
    part.mkdir(parents=True)
    (part / "partition").write_text("2\n")
    link = block_devices / f"{os.major(number)}:{os.minor(number)}"
    link.symlink_to(part)
    (disk / "serial").write_text("S3RIAL\n")
    assert key_of_root() == "disk S3RIAL partition 2"
    (disk / "wwid").write_text("eui.0123\n")
    assert key_of_root() == "disk eui.0123 partition 2"
    link.unlink()
    link.symlink_to(disk)
    assert key_of_root() == "disk eui.0123"


def test_key_without_a_disk(block_devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_id, "_mounted", lambda number: None)
    number = os.stat("/").st_dev
    assert key_of_root() == f"device {os.major(number)}:{os.minor(number)}"
    monkeypatch.setattr(device_id, "_mounted", lambda number: "mount server:/export")
    assert key_of_root() == "mount server:/export"


def test_uuid_of_zeros_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told = bytes([16]) + bytes(16)
    monkeypatch.setattr(device_id.fcntl, "ioctl", lambda *_: told)
    assert device_id._uuid(0) is None
    told = bytes([16]) + bytes(range(16))
    assert device_id._uuid(0) == f"uuid {bytes(range(16)).hex()}"
