"""`fastserial tune`: what it tries, what it believes, what it keeps."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fastserial
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.studies import tuning
from fastserial.bench.studies.tune import MAX_MEMORY, Space, compare, judge, search
from fastserial.bench.studies.tuning import tune_folder
from fastserial.cli.main import app
from fastserial.config import Config
from fastserial.errors import EngineUnavailableError
from fastserial.tuning import lookup, store
from fastserial.tuning.store import Settings

DEFAULT = Settings.of(Config())
OTHER = replace(DEFAULT, block_size=8 << 20)


@pytest.fixture(autouse=True)
def _fresh(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.setattr(tuning, "settle", lambda pause: None)
    lookup.forget_cache()
    yield
    lookup.forget_cache()


class Disk:
    """Takes 1 s per save by default, else what a function says; optionally noisy."""

    def __init__(self, seconds: Callable[[Settings], float], noise: float = 0.0) -> None:
        self._seconds = seconds
        self._chance = random.Random(1)
        self._noise = noise
        self.saves: list[Settings] = []

    def __call__(self, settings: Settings) -> float:
        self.saves.append(settings)
        return self._seconds(settings) * math.exp(self._chance.gauss(0, self._noise))


def deep_queue(settings: Settings) -> float:
    """A disk that likes large blocks, and many of them."""
    return 1.0 / min(settings.block_size * settings.queue_depth / (12 << 20), 4)


# --- the search -------------------------------------------------------------------------------


def test_finds_the_better_settings() -> None:
    found = search(Disk(deep_queue, 0.02), DEFAULT, Space())
    assert deep_queue(found) <= 0.30
    assert found.block_size * found.queue_depth <= MAX_MEMORY


def test_finds_the_better_engine() -> None:
    disk = Disk(lambda settings: 0.5 if settings.engine == "b" else 1.0)
    assert search(disk, DEFAULT, Space(engines=("threads", "b"))) == replace(DEFAULT, engine="b")


def test_an_engine_that_cannot_run_is_never_chosen() -> None:
    disk = Disk(lambda settings: math.inf if settings.engine == "b" else 1.0)
    assert search(disk, DEFAULT, Space(engines=("threads", "b"))) == DEFAULT


def test_stays_with_the_defaults_where_all_is_equal_or_worse() -> None:
    assert search(Disk(lambda settings: 1.0), DEFAULT, Space()) == DEFAULT
    worse = Disk(lambda settings: 1.0 if settings == DEFAULT else 1.5, 0.05)
    assert search(worse, DEFAULT, Space()) == DEFAULT


def test_every_rival_is_measured_beside_the_defaults() -> None:
    disk = Disk(lambda settings: 1.0)
    search(disk, DEFAULT, Space())
    apart = [
        index - before
        for before, index in zip(
            *(lambda at: (at, at[1:]))([i for i, s in enumerate(disk.saves) if s == DEFAULT]),
            strict=False,
        )
    ]
    assert max(apart) <= 1 + len(Space().threads)
    assert all(one.block_size * one.queue_depth <= MAX_MEMORY for one in disk.saves)
    assert all(one.threads <= one.queue_depth for one in disk.saves)


@pytest.mark.parametrize("limit", [1, 2, 5, 17])
def test_stops_in_time_with_what_it_has(limit: int) -> None:
    disk = Disk(deep_queue)
    found = search(disk, DEFAULT, Space(), lambda: len(disk.saves) >= limit)
    assert len(disk.saves) <= limit + 2  # the defaults and the best so far may follow
    assert found == DEFAULT or deep_queue(found) < 1


# --- the verdict ------------------------------------------------------------------------------


def test_a_slower_candidate_is_refused() -> None:
    disk = Disk(lambda settings: 1.2 if settings == OTHER else 1.0)
    verdict = compare(disk, DEFAULT, OTHER, 7)
    assert not verdict.accepted
    assert verdict.reason.startswith("slower")
    assert verdict.gain == pytest.approx(1 / 1.2)
    assert disk.saves.count(DEFAULT) == disk.saves.count(OTHER) == 7
    firsts = disk.saves[::2]
    assert firsts.count(OTHER) == 3  # they take turns in going first


def test_a_faster_candidate_is_accepted() -> None:
    verdict = compare(Disk(lambda s: 0.8 if s == OTHER else 1.0, 0.03), DEFAULT, OTHER, 7)
    assert verdict.accepted
    assert verdict.gain > 1.15


@pytest.mark.parametrize(
    ("ratios", "accepted", "reason"),
    [
        ([1.1] * 7, True, "as fast"),
        ([1.02] * 7, False, "no real gain"),
        ([1.0] * 7, False, "no real gain"),
        ([0.96] * 7, False, "slower"),
        ([0.5] * 3 + [1.1] * 4, False, "no steady gain"),
        ([0.9] + [1.1] * 6, False, "no steady gain"),
        ([0.9] + [1.1] * 8, True, "8 of 9"),
        ([9.0] * 3 + [0.99] * 4, False, "no real gain"),
    ],
)
def test_verdicts(ratios: list[float], accepted: bool, reason: str) -> None:
    verdict = judge(ratios)
    assert verdict.accepted is accepted
    assert reason in verdict.reason


def test_luck_does_not_pass() -> None:
    """Equal settings on a noisy disk: the search is fooled, the pairs seldom are."""
    accepted = 0
    for seed in range(100):
        disk = Disk(lambda settings: 1.0, 0.15)
        disk._chance.seed(seed)
        candidate = search(disk, DEFAULT, Space())
        if candidate != DEFAULT:
            accepted += compare(disk, DEFAULT, candidate, 11).accepted
    assert accepted <= 10


def test_too_few_pairs() -> None:
    with pytest.raises(ValueError, match="at least 7"):
        compare(Disk(lambda settings: 1.0), DEFAULT, OTHER, 6)


# --- real saves -------------------------------------------------------------------------------

FEW = Space(block_sizes=(1 << 20, 2 << 20), queue_depths=(6,), threads=(6,))


def test_real_run(tmp_path: Path) -> None:
    parts: list[float] = []
    found = tune_folder(tmp_path, 16 << 20, 60, 7, lambda part, text: parts.append(part), FEW)
    assert found.saves >= 5
    assert found.tried == 2
    assert found.candidate in (DEFAULT, replace(DEFAULT, block_size=1 << 20))
    (entry,) = store.read().values()
    accepted = found.verdict is not None and found.verdict.accepted
    assert entry.settings == (found.candidate if accepted else None)
    assert entry.nbytes == pytest.approx(16 << 20, rel=0.01)
    assert parts == sorted(parts)
    assert list(tmp_path.iterdir()) == []
    assert not fastserial.installed()


def with_saves(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Settings], float]) -> None:
    monkeypatch.setattr(tuning._Saver, "seconds", lambda self, settings: seconds(settings))


def test_the_better_settings_are_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_saves(monkeypatch, lambda s: 0.001 if s.block_size == 1 << 20 else 0.002)
    found = tune_folder(tmp_path, 16 << 20, 1e6, 7, space=FEW)
    assert found.verdict is not None
    assert found.verdict.accepted
    assert lookup.config_for(tmp_path).block_size == 1 << 20
    # tuned anew where they are slower: the defaults are back
    with_saves(monkeypatch, lambda s: 0.004 if s.block_size == 1 << 20 else 0.002)
    found = tune_folder(tmp_path, 16 << 20, 1e6, 7, space=FEW)
    assert found.verdict is None
    assert lookup.config_for(tmp_path).block_size == DEFAULT.block_size
    assert [entry.settings for entry in store.read().values()] == [None]


def test_a_candidate_that_fails_the_pairs_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "search", lambda *_: OTHER)
    with_saves(monkeypatch, lambda s: 0.002 if s == OTHER else 0.001)
    found = tune_folder(tmp_path, 16 << 20, 1e6, 7, space=FEW)
    assert found.verdict is not None
    assert not found.verdict.accepted
    assert lookup.config_for(tmp_path) == Config()


def test_wrong_bytes_are_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_saves(monkeypatch, lambda s: 0.001 if s.block_size == 1 << 20 else 0.002)
    monkeypatch.setattr(tuning, "digest", lambda path: path.name)
    with pytest.raises(BenchError, match="stock torch"):
        tune_folder(tmp_path, 16 << 20, 1e6, 7, space=FEW)
    assert store.read() == {}
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_cannot_start_takes_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise EngineUnavailableError("no memory may be locked")

    saver = tuning._Saver(tmp_path, {})
    monkeypatch.setattr(tuning, "fast_row", lambda *_, **__: type("Row", (), {"run": refuse})())
    assert saver.seconds(DEFAULT) == math.inf


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="create it first"):
        tune_folder(tmp_path / "missing", 1 << 30, 1, 7)
    monkeypatch.setattr(tuning, "meminfo", lambda: {"MemAvailable": 1 << 20})
    with pytest.raises(BenchError, match=r"says nothing.* 1/\d+ of the .* 1/\d+ of the"):
        tune_folder(tmp_path, 1 << 30, 1, 7)


# --- the command ------------------------------------------------------------------------------


def command(*words: str) -> str:
    done = CliRunner().invoke(app, ["tune", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_space", lambda: FEW)
    with_saves(monkeypatch, lambda s: 0.001 if s.block_size == 1 << 20 else 0.002)
    assert "nothing in" in command("--show")
    told = command(str(tmp_path), "--size", "16MiB", "--pairs", "7", "--seconds", "1000")
    assert "used from now on: 2.00 × as fast" in told
    assert "pair by pair: 2.00, 2.00" in told
    for shown in (command("--show"), command("--show", str(tmp_path))):
        assert "block_size=1MiB" in shown
        assert "2.00 × as fast as the defaults" in shown
    doctor = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    options = {o["name"]: o["source"] for o in json.loads(doctor.output)["options"]}
    assert options["block_size"] == "tune"
    assert "forgotten" in command("--forget", str(tmp_path))
    assert "nothing is known" in command("--forget", str(tmp_path))
    assert lookup.config_for(tmp_path) == Config()


def test_command_says_what_options_keep_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_space", lambda: FEW)
    with_saves(monkeypatch, lambda s: 0.001 if s.block_size == 1 << 20 else 0.002)
    words = [str(tmp_path), "--size", "16MiB", "--seconds", "1000"]
    assert "in force" not in command(*words)
    monkeypatch.setenv("FASTSERIAL_BLOCK_SIZE", "4MiB")
    assert "Not all of it is in force" in command(*words)


def test_command_says_that_the_defaults_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_space", lambda: FEW)
    with_saves(monkeypatch, lambda s: 0.001)
    told = command(str(tmp_path), "--size", "16MiB", "--seconds", "1000")
    assert "Nothing looked faster than the defaults: they are kept." in told
    assert "the defaults (0 pairs" in command("--show")


def test_command_needs_a_folder() -> None:
    done = CliRunner().invoke(app, ["tune"])
    assert done.exit_code == 1
    assert "give the FOLDER" in str(done.exception)
