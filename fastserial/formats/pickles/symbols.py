"""What stands for a value of a pickle that is read without being executed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Call", "Elided", "Global", "Mapping", "Persistent"]


class Global(NamedTuple):
    """A name that unpickling would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent(NamedTuple):
    """What `persistent_load` would be asked for."""

    pid: Any


class Elided(NamedTuple):
    """A value too long to keep: its type and its length (bytes)."""

    kind: str
    nbytes: int


@dataclass(slots=True, eq=False)
class Mapping:
    """A dictionary: keys need not be hashable here."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Call:
    """What unpickling would call, with what it would then put into the result.

    Attributes:
        function: usually a `Global`.
        arguments: positional arguments (a tuple), or whatever the pickle holds instead.
        keywords: keyword arguments, None if there are none.
        state: what `__setstate__` would get, in order.
        appended: items that would be appended.
        items: key and value pairs that would be set.
    """

    function: Any
    arguments: Any
    keywords: Any = None
    state: list[Any] = field(default_factory=list)
    appended: list[Any] = field(default_factory=list)
    items: list[tuple[Any, Any]] = field(default_factory=list)
