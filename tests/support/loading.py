"""Load one file with stock torch and with fastserial, and compare all that can be seen."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fastserial
from fastserial.errors import UnmetOptionWarning
from fastserial.reports import LoadReport
from support.identity import digest, fast, stock

# Small blocks, and `small_file=0`, so that even the smallest file takes the fast path.
FORCED: Mapping[str, Mapping[str, Any]] = {
    "direct": {"small_file": 0, "direct": True, "block_size": 4096, "queue_depth": 3},
    "cached": {"small_file": 0, "direct": False, "block_size": 65536, "threads": 2},
    "verified": {"small_file": 0, "verify_on_load": True, "block_size": 65536, "queue_depth": 1},
}
DEFAULT: Mapping[str, Any] = {}
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@dataclass
class Outcome:
    """What one load gave."""

    value: Any = None
    error: BaseException | None = None
    warned: list[tuple[type[Warning], str]] = field(default_factory=list)
    extra: Any = None

    def seen(self) -> Any:
        """All of it, comparable."""
        said = None if self.error is None else _ADDRESS.sub("0x", str(self.error))
        value = None if self.error is not None else digest(self.value)
        flags = None if self.error is not None else resizable(self.value)
        return value, flags, type(self.error), said, self.warned, self.extra


def attempt(load: Callable[[], Any], extra: Callable[[], Any] = lambda: None) -> Outcome:
    """Run a load; `extra` is asked for more to compare afterwards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = Outcome()
        try:
            outcome.value = load()
        except Exception as error:
            outcome.error = error
    outcome.warned = [
        (one.category, _ADDRESS.sub("0x", str(one.message)))
        for one in caught
        if one.category is not UnmetOptionWarning  # once in a process; `test_wishes.py` has them
    ]
    outcome.extra = extra()
    return outcome


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Plain tensors in a value, as far as they are easy to find."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, torch.nn.Module):
        yield from tensors(value.state_dict())


def resizable(value: Any) -> list[bool | None]:
    """Which storages may change their size: zip loads give memory that may not."""
    found: list[bool | None] = []
    try:
        for tensor in tensors(value):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                found.append(tensor.untyped_storage().resizable())
    except RecursionError:
        found.append(None)
    return found


def last_report() -> LoadReport:
    """What the last load of this process did."""
    report = fastserial.last_load_report()
    assert report is not None
    return report


def opened(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by `open`."""
    with fastserial.open(path) as file:
        return {key: file.get_tensor(key) for key in file}


def filled(target: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The same tensors, filled by `load_into`."""
    fastserial.load_into(target, path)
    return target


@contextlib.contextmanager
def forced(monkeypatch: pytest.MonkeyPatch, large: int) -> Iterator[None]:
    """Memory of their own for records from `large` bytes on."""
    from fastserial.loading import prefetch, reader

    with monkeypatch.context() as patch:
        for module in (reader, prefetch):
            patch.setattr(module, "IN_PLACE", large)
        yield


@pytest.fixture
def all_forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with forced(monkeypatch, 5000):
        yield


def both(
    load: Callable[[], Any],
    *option_sets: Mapping[str, Any],
    extra: Callable[[], Any] = lambda: None,
    twice: bool = True,
) -> Outcome:
    """Load with stock, then with fastserial under each set of options: all outcomes agree.

    Returns what stock gave. Skips what stock cannot repeat; `conftest` limits how often.
    """
    with stock():
        want = attempt(load, extra)
        seen = want.seen()
        if twice and attempt(load, extra).seen() != seen:
            pytest.skip("stock does not give the same twice")
    if isinstance(want.error, SystemError):  # torch 2.9 now and then, with a generator's state
        pytest.skip(f"stock breaks inside torch: {want.error}")
    with fast():
        for options in option_sets or (DEFAULT, *FORCED.values()):
            with fastserial.options(**options):
                got = attempt(load, extra)
                again = got.seen()
            if isinstance(got.error, SystemError):  # as above: torch's, by either way
                pytest.skip(f"stock breaks inside torch: {got.error}")
            if again != seen:
                break
        else:
            return want
    with stock():
        if twice and any(attempt(load, extra).seen() != seen for _ in range(5)):
            pytest.skip("stock does not give the same twice")  # only most of the time
    raise AssertionError(
        f"options {dict(options)}: stock {want.error!r} {want.warned} {want.extra}, "
        f"fastserial {got.error!r} {got.warned} {got.extra}"
    )
