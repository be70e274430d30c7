"""The site shows what the repository shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from markdown import Markdown
from markdown_it import MarkdownIt

import fastserial
from fastserial import distributed, errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
EXTENSIONS = ["admonition", "attr_list", "tables", "toc", "pymdownx.superfences"]
TAGS = ("li", "ol", "ul", "pre", "table", "tr", "h2", "h3", "strong")

sys.path.insert(0, str(ROOT / "docs" / "site"))


def _count(html: str) -> dict[str, int]:
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in TAGS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lists_and_blocks_are_the_same_on_the_site(page: Path) -> None:
    """Python-Markdown and CommonMark differ in how far the parts of a list are indented."""
    text = page.read_text(encoding="utf-8")
    text = "\n".join(line for line in text.split("\n") if not line.startswith(":::"))
    site = _count(Markdown(extensions=EXTENSIONS).convert(text))
    repository = _count(MarkdownIt("commonmark").enable("table").render(text))
    assert site == repository


def test_links_between_root_and_docs() -> None:
    from hooks import from_docs, from_root

    assert from_root("[a](docs/guide/dcp.md#b) [c](LICENSE)") == "[a](guide/dcp.md#b) [c](LICENSE)"
    assert from_root("[a](CONTRIBUTING.md)") == "[a](contributing.md)"
    assert from_docs("[a](../../CHANGELOG.md#b)") == "[a](../changelog.md#b)"
    assert from_docs("[a](dcp.md)") == "[a](dcp.md)"


def test_links_reach_files_in_the_repository() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_api_page_names_all_that_is_public() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    public = {f"fastserial.distributed.{name}" for name in distributed.__all__}
    for name in fastserial.__all__:
        value = getattr(fastserial, name)
        if isinstance(value, type) and issubclass(value, BaseException):
            assert value.__module__ == errors.__name__  # shown as a whole
        elif name != "__version__":
            public.add(f"fastserial.{name}")
    assert "fastserial.errors" in shown
    assert public <= shown
