"""What the pages promise has tests, what they measure a date, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROMISES = ROOT / "docs" / "internals" / "promises.md"

DATE = re.compile(
    r"\b\d{1,2} (?:January|February|March|April|May|June|July|August|September|October|November"
    r"|December) 20\d\d\b"
)
COMMAND = re.compile(r"`(?:fastserial|fio|nox|python|benchmarks/\w+\.py)\b[^`]*`")
FIGURE = re.compile(
    r"(?<![\w-])\d[\d.,]*\s?(?:×|[kMGT]i?B/s|ms\b|µs\b|s\b|seconds\b|%)|×\s?\d"
    r"|\b\w+ times as (?:fast|slow)\b"
)
RESULTS = re.compile(r"benchmarks/results/[\w.-]+\.json")
# What was never measured: limits of the program, and arithmetic or sources that a page names.
LIMITS = [
    r"slower than 400 MB/s",
    r"throttled at \d+ MB/s",
    r"3 % faster",
    r"after 30 seconds a line in the log",
    r"A search takes 1 % of the time at most: after one that took\s+10 ms",
    r"ext4\s+reserves 5 %",
    r"full at 99 %",
    r"1\.10 × the defaults",
    r"FSDP 32 × tensor",
    r"`block_size` × `queue_depth`",
]
COMPUTED = {"scale.md"}  # says of each figure whether it is computed or reported, and from what


def sections(page: Path) -> list[tuple[str, str]]:
    """Return the sections of a page, as heading and text, without blocks of code."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = [("", "")]
    for line in text.split("\n"):
        if line.startswith("#"):
            found.append((line.lstrip("# "), ""))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


def undated(text: str) -> list[str]:
    """Return the figures of a section without date and command, and without a file of results."""
    for limit in LIMITS:
        text = re.sub(limit, "", text)
    if DATE.search(text) and COMMAND.search(text):
        return []
    if any((ROOT / file).exists() for file in RESULTS.findall(text)):
        return []
    return [match[0] for match in FIGURE.finditer(re.sub(r"`[^`]*`", "", text))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_have_a_date_and_a_command(page: Path) -> None:
    if page.name in COMPUTED:
        return
    odd = {heading: figures for heading, text in sections(page) if (figures := undated(text))}
    assert not odd


@pytest.mark.parametrize("text", ["2.0 GB/s", "5.4 × stock", "takes 12 ms", "twice, or 3 s", "7 %"])
def test_a_figure_without_them_is_seen(text: str) -> None:
    assert undated(f"On some day it was {text}.")
    assert undated(f"{text} (24 November 2026)")
    assert undated(f"{text} (benchmarks/results/missing.json)")
    assert not undated(f"{text} (`fastserial bench save`, 24 November 2026)")


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_a_page_begins_with_what_the_reader_can_do_after_it(page: Path) -> None:
    _, text = sections(page)[1]
    assert text.lstrip().startswith("After this page ")


def named_tests() -> list[str]:
    """Return the tests that the page of promises names."""
    return re.findall(r"`(tests/[^`]+)`", PROMISES.read_text(encoding="utf-8"))


def test_promises_name_tests() -> None:
    rows = [line for line in PROMISES.read_text().split("\n") if re.match(r"\| [A-Z]", line)]
    without = [row for row in rows if "`tests/" not in row and "| Tests |" not in row]
    assert not without
    assert named_tests()


@pytest.mark.parametrize("name", named_tests())
def test_a_test_that_a_promise_names_exists(name: str) -> None:
    path, _, function = name.partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^ *def {function}\(", source, re.MULTILINE)


MODULE = re.compile(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+)?)`")
# Comments name files, too: what a block is "not run" for, some test does.
FILE = re.compile(r"(?<![\w/])((?:tests|benchmarks|fastserial|docs)/[a-z_0-9./]+\.(?:py|md))\b")
TEST = re.compile(r"(?<![\w/])(test_\w+\.py)\b")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    known = {*(file.name for file in (ROOT / "tests").rglob("*.py")), "test_mine.py"}
    missing += set(TEST.findall(text)) - known - {"test_serialization.py"}  # the user's, torch's
    assert not missing


def _trials() -> dict[str, int]:
    """Return the rows of the table of `nox -s faults`: what was tried, and how often."""
    text = (ROOT / "docs" / "internals" / "fault-injection.md").read_text(encoding="utf-8")
    text = text.partition("Saves during training")[0]
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| (.+) \|$", text, re.MULTILINE)
    full = next(outcome for what, _, outcome in rows if what.startswith("full disk"))
    found = {what: int(count.replace(",", "")) for what, count, _ in rows}
    return {**found, "ENOSPC": int(full.split()[0])}


def test_counts_of_the_readme_are_those_of_the_table() -> None:
    trials = _trials()

    def total(start: str) -> int:
        return sum(count for what, count in trials.items() if what.startswith(start))

    power = total("power cut") + total("the same after saves to new names")
    counts = f"a kill ({total('`kill -9` at')} tried), a simulated power cut ({power})"
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{counts} or a full disk ({trials['ENOSPC']})" in text


def test_inputs_of_the_fuzzers_add_up() -> None:
    text = (ROOT / "docs" / "internals" / "fault-injection.md").read_text(encoding="utf-8")
    listed = re.findall(r"(\d[\d,]*) (?:pickles|safetensors|legacy|zip|DCP inputs)", text)
    total = sum(int(count.replace(",", "")) for count in listed)
    assert total == sum(count for what, count in _trials().items() if "under atheris" in what)


def test_packages_and_modules_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    named = MODULE.findall(text)
    places = [ROOT, ROOT / "fastserial", ROOT / "fastserial" / "distributed"]
    missing = [
        name
        for name in named
        if not any((place / name).is_dir() or (place / f"{name}.py").exists() for place in places)
    ]
    assert named
    assert not missing
