"""What the site takes from outside of docs/: the README, CONTRIBUTING and CHANGELOG as pages.

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
}
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for source, page in _PAGES.items():
        text = (_ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_LINK.sub(_from_root, text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links that leave docs/ into links to the pages made of their targets."""
    return _LINK.sub(_from_docs, markdown)


def _from_root(match: re.Match[str]) -> str:
    target = match[1].removeprefix("docs/")
    return _PAGES.get(target, target)


def _from_docs(match: re.Match[str]) -> str:
    target = match[1]
    return _PAGES.get(target.removeprefix("../"), target) if target.startswith("../") else target
