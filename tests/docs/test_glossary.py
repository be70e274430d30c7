"""One word, one thing: the names of classes, and the table of words of the architecture."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = ROOT / "docs/internals/architecture.md"


def test_no_class_name_means_two_things() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "fastserial").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_each_word_of_the_glossary_has_one_row() -> None:
    _, _, glossary = WORDS.read_text().partition("\n## Words\n")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", glossary, re.MULTILINE)[1:]
    words = [word.strip() for row in rows for word in row.split(",")]
    assert len(words) > 10
    assert [word for word, count in Counter(words).items() if count > 1] == []
