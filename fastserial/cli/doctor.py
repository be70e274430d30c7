"""The report of `fastserial doctor` as text: the facts of its JSON, a line each, and findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fastserial.console import print_table, say
from fastserial.diagnosis.examine import Diagnosis
from fastserial.reports import format_bytes


def show(found: Diagnosis) -> None:
    """Print a diagnosis to standard output."""
    facts = dataclasses.asdict(dataclasses.replace(found, findings=()))
    print_table(("fact", "value"), [*_lines(facts)])
    say("")
    if not found.findings:
        say("All is well, for saves and for loads.")
    for finding in found.findings:
        mark = "fails" if finding.fails else "slow" if finding.slow else "note"
        say(f"{mark}  {finding.text}")
        say(f"      → {finding.remedy}")


def _lines(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact; those of a fact that has parts are named `fact.part`."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            for one in value:
                parts = one.items() if isinstance(one, Mapping) else ()
                words = [f"{key} {_text(key, part)}" for key, part in parts]
                yield prefix + name, ", ".join(words) or str(one)
        else:
            yield prefix + name, _text(name, value)


def _text(name: str, value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    sized = isinstance(value, int) and name.endswith("bytes")
    return format_bytes(value) if sized else str(value)  # type: ignore[arg-type]
