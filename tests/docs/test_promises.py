"""What the pages promise has tests, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROMISES = ROOT / "docs" / "internals" / "promises.md"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_a_page_begins_with_what_the_reader_can_do_after_it(page: Path) -> None:
    _, _, text = page.read_text(encoding="utf-8").partition("\n")
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
FILE = re.compile(r"`((?:tests|benchmarks|fastserial|docs)/[a-z_0-9./]+\.(?:py|md))\b")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    assert not missing


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
