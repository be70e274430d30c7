"""Where options come from, and which of them wins."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastserial
from fastserial import ConfigError, config
from fastserial.errors import EngineUnavailableError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        if name.startswith("FASTSERIAL_"):
            monkeypatch.delenv(name)
    config.forget_installed()
    yield
    config.forget_installed()


def test_a_misspelt_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown option engin \(is engine meant\?\)"):
        fastserial.install(engin="threads")
    assert not fastserial.installed()


def test_the_nearer_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    default = config.current()
    assert default == config.Config()
    monkeypatch.setenv("FASTSERIAL_QUEUE_DEPTH", "2")
    monkeypatch.setenv("FASTSERIAL_BLOCK_SIZE", "64k")
    assert (config.current().queue_depth, config.current().block_size) == (2, 65536)
    for text, value in (("auto", "auto"), ("0", False), ("yes", True)):
        monkeypatch.setenv("FASTSERIAL_DIRECT", text)
        assert config.current().direct == value
    config.set_installed(queue_depth=3)
    assert (config.current().queue_depth, config.current().block_size) == (3, 65536)
    with fastserial.options(queue_depth=4):
        assert config.current().queue_depth == 4
        with fastserial.options(threads=1):
            assert (config.current().queue_depth, config.current().threads) == (4, 1)
        assert config.current().threads == default.threads
        assert config.current(queue_depth=5).queue_depth == 5
    assert config.current().queue_depth == 3


def test_a_later_install_keeps_what_it_does_not_give() -> None:
    fastserial.install(durable=False, threads=2)
    try:
        fastserial.install(threads=4)
        assert (config.current().durable, config.current().threads) == (False, 4)
        with pytest.raises(ConfigError):
            fastserial.install(durable=True, threads=0)
        assert (config.current().durable, config.current().threads) == (False, 4)
    finally:
        fastserial.uninstall()
    assert config.current() == config.Config()
    assert not fastserial.uninstall()


def test_options_are_of_one_thread() -> None:
    seen: list[int] = []
    with fastserial.options(queue_depth=5):
        thread = threading.Thread(target=lambda: seen.append(config.current().queue_depth))
        thread.start()
        thread.join()
    assert seen == [config.Config().queue_depth]


def test_functions_are_not_kept_when_they_are_no_options_any_more(tmp_path: Path) -> None:
    """A closure may hold a model; save_async runs in a copy of the block's context."""

    class Callback:
        def __call__(self, report: object) -> None:
            seen.append(report)

    seen: list[object] = []
    kept = []
    for how in ("options", "async", "load", "installed"):
        given = Callback()
        kept.append(weakref.ref(given))
        if how == "installed":
            fastserial.install(on_report=given)
            torch.save([1], tmp_path / "x")
            fastserial.uninstall()
        elif how == "async":
            with fastserial.options(on_report=given):
                save = fastserial.save_async([torch.ones(3)], tmp_path / "x")
            save.result()
            del save
        else:
            with fastserial.options(on_report=given, on_load=given):
                fastserial.save([1], tmp_path / "x")
                fastserial.load(tmp_path / "x")
        del given
        gc.collect()
    assert len(seen) >= 4
    assert [one() for one in kept] == [None] * 4


def test_sizes() -> None:
    sizes = {"4096": 4096, "64k": 65536, "8MiB": 8 << 20, "0.5m": 512 << 10, "1.5kb": 1500}
    assert {text: config.parse_size(text) for text in sizes} == sizes
    for text in ("", "x", "8XB", "-", "k", "nan", "1e999", "1e400GiB"):
        with pytest.raises(ConfigError, match="expected a size"):
            config.parse_size(text)


@pytest.mark.parametrize(
    "values",
    [
        {"block_size": 1000},
        {"block_size": 0},
        {"queue_depth": 0},
        {"threads": 5000},
        {"small_file": -1},
        {"block_size": "2MiB"},
        {"threads": 1.5},
        {"durable": "no"},
        {"progress": None},
        {"engine": None},
        {"direct": "maybe"},
        {"cache": "some"},
        {"no_such_option": 1},
    ],
)
def test_impossible_values(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.set_installed(**values)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ConfigError), fastserial.options(**values):
        pass
    assert config.current() == config.Config()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"direct": 0}, {"direct": False}),
        ({"direct": 1}, {"direct": True}),
        ({"direct": np.False_}, {"direct": False}),
        ({"direct": np.True_}, {"direct": True}),
        ({"durable": 0, "threads": np.int64(3)}, {"durable": False, "threads": 3}),
        ({"cache": np.str_("drop")}, {"cache": "drop"}),
    ],
)
def test_values_that_are_equal_mean_the_same(
    given: dict[str, Any], meant: dict[str, Any], tmp_path: Path
) -> None:
    state = {"x": torch.ones(1 << 20)}
    reports = []
    for number, values in enumerate((given, meant)):
        config.forget_installed()
        config.set_installed(small_file=0, **values)
        assert all(getattr(config.current(), name) is value for name, value in meant.items())
        reports.append(fastserial.save(state, tmp_path / str(number)))
    ours, theirs = reports
    assert ours is not None
    assert theirs is not None
    assert (ours.direct, ours.durable) == (theirs.direct, theirs.durable)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DURABLE", "perhaps"),
        ("THREADS", "two"),
        ("CACHE", "kep"),
        ("BLOCK_SIZE", "1000"),
        ("DIRECT", ""),
        ("ENGINE", "warp"),
    ],
)
def test_a_bad_value_in_the_environment_is_named_and_the_rest_is_on(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config, "_refused", {})
    monkeypatch.setenv(f"FASTSERIAL_{name}", text)
    monkeypatch.setenv("FASTSERIAL_RETRY_SECONDS", "7")
    with pytest.warns(UserWarning, match=f"FASTSERIAL_{name} .*{text}"):
        fastserial.install()
    try:
        assert fastserial.installed()
        assert config.current() == config.Config(retry_seconds=7)
        assert config.origin_of(name.lower()) == "default"
        torch.save(torch.ones(1 << 21), tmp_path / "x")
        report = fastserial.last_save_report()
        assert report is not None
        assert (report.path, report.engine) == (str(tmp_path / "x"), "threads")
        with pytest.raises(ConfigError):  # the call's own values are another matter
            fastserial.install(cache="kep")
    finally:
        fastserial.uninstall()
    (why,) = config.refused_variables()
    assert why.startswith(f"FASTSERIAL_{name}: ")


@pytest.mark.filterwarnings("error")
def test_a_bad_value_fails_no_save_where_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "_refused", {})
    monkeypatch.setattr(config, "_names_checked", False)
    monkeypatch.setenv("FASTSERIAL_CACHE", "kep")
    monkeypatch.setenv("FASTSERIAL_DURABEL", "0")
    assert fastserial.save([1], tmp_path / "x") is not None
    assert "FASTSERIAL_CACHE" in caplog.text
    assert "FASTSERIAL_DURABEL" in caplog.text


def test_an_engine_that_a_call_names_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERIAL_ENGINE", "threads")
    with pytest.raises(EngineUnavailableError, match="warp"):
        fastserial.install(engine="warp")
    assert not fastserial.installed()
