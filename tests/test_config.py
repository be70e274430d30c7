"""Where options come from, and which of them wins."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

import fastserial
from fastserial import ConfigError, config


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


def test_bad_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("DURABLE", "perhaps"), ("THREADS", "two"), ("CACHE", "some")):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=name):
            patch.setenv(f"FASTSERIAL_{name}", text)
            config.current()
