"""Pages of the site from outside of docs/: README, CONTRIBUTING, CHANGELOG, SECURITY.

Their links are written for the repository; here they are made to fit the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    ".github/SECURITY.md": "security-policy.md",
}
_NOTE = re.compile(r"^ *<!-- (?:not run|needs): .+ -->\n", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for source, page in _PAGES.items():
        text = from_root((_ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fit links to the site, and leave out what the tests are told about blocks."""
    return _NOTE.sub("", from_docs(markdown))


def from_root(text: str) -> str:
    """Return a text of the repository's root with links as a page of docs/ has them."""

    def linked(match: re.Match[str]) -> str:
        target = match[1].removeprefix("../").removeprefix("docs/")
        return _PAGES.get(target, target)

    return _LINK.sub(linked, text)


def from_docs(text: str) -> str:
    """Return a text of docs/FOLDER/ with links to the pages that are made of files outside."""

    def linked(match: re.Match[str]) -> str:
        page = _PAGES.get(match[1].removeprefix("../../"))
        return f"../{page}" if page else match[1]

    return _LINK.sub(linked, text)
