"""The options of fastserial that were in force: a result without them says little."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastserial.config import Config

__all__ = ["describe_options", "plain_options"]


def plain_options(options: Config) -> dict[str, Any]:
    """Return the options whose values are text or numbers, for JSON."""
    values = dataclasses.asdict(options)
    # the rest are functions that are called with reports
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}


def describe_options(options: Mapping[str, Any]) -> str:
    """Return them in one line."""
    return f"fastserial: {', '.join(f'{name}={value}' for name, value in options.items())}"
