"""Which entries of a checkpoint `resume` restores, their names, and which do not match."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.nn import Module

from fastserial.errors import LoadMismatchError
from fastserial.training.wrapped import plain, state_of_module


class StateName(NamedTuple):
    """An entry of the state, or a key of a module in it; printed as `model.0.weight`."""

    entry: str
    key: str | None = None

    def __str__(self) -> str:
        return self.entry if self.key is None else f"{self.entry}.{self.key}"


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """What is to be restored.

    Attributes:
        state, per_rank: the values that are filled: common to all ranks, and each rank's own.
        only: the names to restore; None: all of them, and the random generators.
        strict: the file and the modules must have the same names.
        rename: prefixes of names in the file, and the prefixes here.
    """

    state: Mapping[str, Any]
    per_rank: Mapping[str, Any]
    only: Collection[str] | None = None
    strict: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)

    @property
    def objects(self) -> dict[str, Any]:
        """The values of `state` that are filled."""
        return {name: value for name, value in self.state.items() if self.wants(name)}

    def wants(self, name: str) -> bool:
        """Return whether an entry is to be restored."""
        return self.only is None or name in self.only

    @property
    def is_partial(self) -> bool:
        """Whether the file may have other names than the state."""
        return self.only is not None or not self.strict or bool(self.rename)


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What `resume` did.

    Attributes:
        step: of the checkpoint; None if there was none.
        path: of its file.
        missing: names that the file lacks; their values are unchanged.
        unused: names in the file that the state does not have.
    """

    step: int | None = None
    path: str | None = None
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


class NameDifference(NamedTuple):
    """Names that the file lacks, and names in the file that the state does not have."""

    missing: list[StateName]
    unused: list[StateName]


def names_here(
    objects: Mapping[str, Any], state_of: Callable[[Any], Mapping[str, Any]] = state_of_module
) -> set[StateName]:
    """Return the names of what is filled; of modules, those of the keys in their state."""
    found: set[StateName] = set()
    for entry, value in objects.items():
        module = plain(value)
        keys = state_of(module) if isinstance(module, Module) else (None,)
        found.update(StateName(entry, key) for key in keys)
    return found


def names_in(value: Mapping[str, Any]) -> list[StateName]:
    """Return the names of what a file holds; of dictionaries with string keys, each key."""
    return [StateName(entry, key) for entry, item in value.items() for key in _keys(item)]


def _keys(value: Any) -> Iterable[str | None]:
    named = isinstance(value, Mapping) and value and all(type(key) is str for key in value)
    return value if named else (None,)


def difference(
    here: Collection[StateName], there: Collection[StateName], whole: bool
) -> NameDifference:
    """Compare what is filled with what the file holds, by the names that the state uses.

    Args:
        whole: entries of the file that are not in the state count as unused, too.
    """
    mine, theirs = {name.entry for name in here}, {name.entry for name in there}
    modules = {name.entry for name in here if name.key is not None}
    known = {*there, *map(StateName, theirs)}
    missing = [name for name in here if name not in known]
    unused = [name for name in there if name.entry in modules and name not in here]
    if whole:
        unused += [StateName(entry) for entry in theirs - mine]
    return NameDifference(sorted(missing, key=str), sorted(unused, key=str))


def renamed_name(name: StateName, rename: Mapping[str, str]) -> StateName:
    """Return the name here for a name in the file; the first rule that matches applies."""
    text = str(name)
    for old, new in rename.items():
        if text == old or text.startswith(f"{old}."):
            changed = new + text[len(old) :]
            return StateName(changed) if name.key is None else StateName(*changed.split(".", 1))
    return name


def renamed(found: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file holds under the names that the state uses."""
    made: dict[str, Any] = {}
    for entry, value in found.items():
        for key in _keys(value):
            new = renamed_name(StateName(entry, key), rename)
            if new.key is None:
                made[new.entry] = value if key is None else value[key]
                continue
            if new.entry not in made:
                made[new.entry] = copy.copy(value)  # keeps the versions of its modules
                made[new.entry].clear()
            made[new.entry][new.key] = value[key]
    return made


def lacks_of_rank(path: str, names: Iterable[str]) -> LoadMismatchError:
    """Return the error for `per_rank` entries of this rank that a file lacks."""
    return LoadMismatchError(
        f"{path}: it has no {', '.join(names)} for this rank: it was saved by another number of "
        "ranks, or without these entries. resume(strict=False) leaves them unchanged"
    )
