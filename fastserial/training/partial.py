"""What of a checkpoint `resume` restores, under which names; what was missing, or left over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.nn import Module

from fastserial.errors import LoadMismatchError
from fastserial.training.wrapped import plain, state_of_module

__all__ = ["Difference", "Name", "Request", "ResumeReport", "difference", "names_here", "names_in"]
__all__ += ["lacks_of_rank", "renamed", "renamed_name"]


class Name(NamedTuple):
    """An entry of the state, or a key of the module there; shown as `model.0.weight`."""

    entry: str
    key: str | None = None

    def __str__(self) -> str:
        return self.entry if self.key is None else f"{self.entry}.{self.key}"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be restored.

    Attributes:
        state, per_rank: what is filled: of all ranks, and of each rank for itself.
        only: names of them; None: all, and random generators.
        strict: the file must have what is here, and a module what the file has of it.
        rename: what names in the file begin with, and what the names here begin with instead.
    """

    state: Mapping[str, Any]
    per_rank: Mapping[str, Any]
    only: Collection[str] | None = None
    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)

    @property
    def objects(self) -> dict[str, Any]:
        """What is filled of the state."""
        return {name: value for name, value in self.state.items() if self.wants(name)}

    def wants(self, name: str) -> bool:
        """Tell whether an entry is to be restored."""
        return self.only is None or name in self.only

    @property
    def is_partial(self) -> bool:
        """Whether the file may hold other things than what is here."""
        return self.only is not None or not self.strict or bool(self.rename)


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What `resume` did.

    Attributes:
        step: of the checkpoint; None if there was none.
        path: of its file.
        missing: names of what the file lacks, which stayed as it was.
        unused: names of what the file holds and had no place here.
    """

    step: int | None = None
    path: str | None = None
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


class Difference(NamedTuple):
    """Names that the file lacks, and names that have no place here."""

    missing: list[Name]
    unused: list[Name]


def names_here(
    objects: Mapping[str, Any], state_of: Callable[[Any], Mapping[str, Any]] = state_of_module
) -> set[Name]:
    """Return the names of what is filled: of modules each key of what `state_of` returns."""
    found: set[Name] = set()
    for entry, value in objects.items():
        module = plain(value)
        keys = state_of(module) if isinstance(module, Module) else (None,)
        found.update(Name(entry, key) for key in keys)
    return found


def names_in(value: Mapping[str, Any]) -> list[Name]:
    """Return the names of what a file holds: of dictionaries of texts each key."""
    return [Name(entry, key) for entry, item in value.items() for key in _keys(item)]


def _keys(value: Any) -> Iterable[str | None]:
    named = isinstance(value, Mapping) and value and all(type(key) is str for key in value)
    return value if named else (None,)


def difference(here: Collection[Name], there: Collection[Name], whole: bool) -> Difference:
    """Compare what is filled with what the file holds, both by the names of here."""
    mine, theirs = {name.entry for name in here}, {name.entry for name in there}
    modules = {name.entry for name in here if name.key is not None}
    known = {*there, *map(Name, theirs)}
    missing = [name for name in here if name not in known]
    unused = [name for name in there if name.entry in modules and name not in here]
    if whole:
        unused += [Name(entry) for entry in theirs - mine]
    return Difference(sorted(missing, key=str), sorted(unused, key=str))


def renamed_name(name: Name, rename: Mapping[str, str]) -> Name:
    """Return the name here of what the file calls otherwise; the first rule that fits counts."""
    text = str(name)
    for old, new in rename.items():
        if text == old or text.startswith(f"{old}."):
            changed = new + text[len(old) :]
            return Name(changed) if name.key is None else Name(*changed.split(".", 1))
    return name


def renamed(found: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file holds, by the names here."""
    made: dict[str, Any] = {}
    for entry, value in found.items():
        for key in _keys(value):
            new = renamed_name(Name(entry, key), rename)
            if new.key is None:
                made[new.entry] = value if key is None else value[key]
                continue
            if new.entry not in made:
                made[new.entry] = copy.copy(value)  # with the versions of its modules
                made[new.entry].clear()
            made[new.entry][new.key] = value[key]
    return made


def lacks_of_rank(path: str, names: Iterable[str]) -> LoadMismatchError:
    """Return the error for entries `per_rank` that a file does not have of this rank."""
    return LoadMismatchError(
        f"{path}: it has no {', '.join(names)} of this rank: it is of another number of ranks, or "
        "was saved without. resume(strict=False) leaves them as they are"
    )
