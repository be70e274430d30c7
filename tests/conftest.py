"""For all tests: torch's functions are compiled once, not at each of thousands of `install()`s.

That takes 25 ms each time. How they are compiled is tested in processes of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest
from support.forms import dice, trials  # noqa: F401
from support.loading import all_forced  # noqa: F401

from fastserial.patching import install, patches

# Loads that stock itself does not repeat cannot be compared: 4 of them today.
_MOST_INCOMPARABLE = 8
_incomparable: list[str] = []

# What `-m "not slow"` leaves out: folders, files and tests that start programs, mount file systems,
# train, or run every object of the corpus (of these, `test_properties.py` has a sample).
_SLOW = tuple(
    """
    bench/ compat/ deepspeed/ docs/ faults/ framework_suites/ gpu/ integrations/ package/
    torch_suite/
    checkpoints/test_archives_of_others.py::test_other_archives
    checkpoints/test_bad_input.py checkpoints/test_budgets.py::test_a_
    checkpoints/test_convert.py::test_memory
    checkpoints/test_dcp_folders.py::test_any_flipped_bit_is_found_and_named
    checkpoints/test_hostile_pickles.py
    checkpoints/test_load_into.py::test_memory
    checkpoints/test_open.py::test_corpus
    checkpoints/test_verification.py::test_every_changed_byte_of_a_zip_is_found
    checkpoints/test_verification.py::test_more_than_4_gib
    checkpoints/test_verification.py::test_what_stock_torch_writes_is_whole
    cli/test_cli.py diagnosis/test_doctor.py
    distributed/test_dcp_alone.py distributed/test_dcp_ranks.py distributed/test_dcp_with_stock.py
    distributed/test_distributed_ distributed/test_kills.py
    distributed/test_targets.py distributed/test_unstepped.py
    engines/test_io_uring.py files/test_attributes.py
    formats/test_pickles.py::test_values
    formats/test_zip_layout.py::test_more_records_than_16_bits
    loading/test_load.py loading/test_load_damaged.py::test_random_damage
    overlap/test_hostile.py overlap/test_memory.py overlap/test_pending.py
    patching/test_install.py saving/test_identity.py
    saving/test_writer.py::test_peak_memory_is_the_pool
    test_interrupts.py::test_while test_surroundings.py
    training/test_checkpointer_ training/test_mirror.py::test_all_ranks
    training/test_mirror.py::test_kills training/test_partial.py::test_parts
    """.split()
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.partition("tests/")[2]
        if name.startswith(_SLOW) or item.get_closest_marker("trials") is not None:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith("stock "):
            _incomparable.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(_incomparable) > _MOST_INCOMPARABLE:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if len(_incomparable) > _MOST_INCOMPARABLE:
        terminalreporter.section(f"more than {_MOST_INCOMPARABLE} loads were not compared")
        for line in _incomparable:
            terminalreporter.write_line(line)


@functools.cache
def _compiled(version: str) -> tuple[patches.Installation, tuple[CodeType, ...]]:
    made = patches.prepare(version)
    return made, tuple(swap.ours.__code__ for swap in made.swaps)


def _prepare(version: str) -> patches.Installation:
    """Return fresh functions: `uninstall` gives them the code of the originals."""
    made, codes = _compiled(version)
    swaps = []
    for swap, code in zip(made.swaps, codes, strict=True):
        old = swap.ours
        new = FunctionType(code, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
        new.__kwdefaults__ = old.__kwdefaults__
        functools.update_wrapper(new, old)
        del new.__wrapped__  # type: ignore[attr-defined]
        swaps.append(swap._replace(ours=new))
    return made._replace(swaps=tuple(swaps))


@pytest.fixture(autouse=True, scope="session")
def _compiled_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "prepare", _prepare)
        yield
