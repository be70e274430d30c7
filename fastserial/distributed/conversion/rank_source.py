"""What is converted from a folder of torch_checkpointing: what all ranks saved, as one.

Nothing of it is lost, or chosen: dictionaries are united, shards put together, and what several
ranks have has to be equal. Anything else is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.tensor  # else `weights_only` loads no DTensors

from fastserial.checkpoints.convert import part_of
from fastserial.checkpoints.mapped_source import MappedSource
from fastserial.checkpoints.rank_folder import RANK_FOLDER, RankFolder
from fastserial.distributed.conversion.assembled import Assembled
from fastserial.distributed.conversion.rank_tensors import RankTensors
from fastserial.distributed.state.merging import Union
from fastserial.errors import ConvertError
from fastserial.interrupts import finish
from fastserial.memory.storages import Memory

__all__ = ["RankSource"]

_SHOWN = 40  # characters of a value


class RankSource:
    """The files of a folder, mapped.

    Attributes:
        container: the name of the format.
        value: what is under the key that was asked for; items are its first level.
        metadata: none.
    """

    def __init__(self, path: str, found: RankFolder, key: str = "") -> None:
        """Open the files that a key needs, and put together what is under it.

        Raises:
            ConvertError: there is nothing under the key, a pickle needs more than `weights_only`
                allows, or ranks have what does not go together; names the key.
            CorruptCheckpointError: a file is damaged.
            OSError: one cannot be read.
        """
        self.container = RANK_FOLDER
        self.metadata: dict[str, str] = {}
        self._path = path
        self._files = MappedSource(RANK_FOLDER)
        self._made = Assembled()
        try:
            self.value = self._together(found, key)
        except RecursionError as error:
            self.close()
            raise ConvertError(f"{path}: what is in it is nested too deeply") from error
        except BaseException:
            self.close()
            raise

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return where bytes of a storage come from, None if it has them itself."""
        found = self._made.part_of(storage, start, nbytes)
        return self._files.part_of(storage, start, nbytes) if found is None else found

    def in_order(self, tensor: torch.Tensor) -> Memory | None:
        """Return where the bytes of a tensor come from, in the order of its elements."""
        return self._made.in_order(tensor)

    def check_unchanged(self) -> None:
        """Raise if a file was written to.

        Raises:
            CorruptCheckpointError: one was.
        """
        self._files.check_unchanged()

    def close(self) -> None:
        """Close the files; the tensors must not be used any more."""
        finish(self._files.close, self._made.close)

    def _together(self, found: RankFolder, key: str) -> Any:
        item = key.partition(".")[0]
        if key and item not in found.items:
            part_of(dict.fromkeys(found.items), item)  # says which there are
        states: dict[int, dict[str, Any]] = {}
        for name, files in found.items.items():
            if not key or name == item:
                for rank, file in files.items():
                    value = self._files.add(os.path.join(self._path, file)).value
                    states.setdefault(rank, {})[name] = value
        parts: dict[int, Any] = {}
        problem: ConvertError | None = None
        for rank, state in sorted(states.items()):
            try:
                parts[rank] = part_of(state, key)
            except ConvertError as error:  # another rank may have it
                problem = problem or error
        if problem is not None and not parts:
            raise problem
        tensors = RankTensors(self._files, self._made, states, self._refusal)
        return _OfFiles(tensors, self._refusal).of(key, parts)

    def _refusal(self, key: str, problem: str) -> ConvertError:
        return ConvertError(
            f"{self._path}: entry {key!r}: {problem}: convert the file of one rank, or another "
            "part with --key (key=)"
        )


class _OfFiles(Union):
    """What several ranks saved: it has to be equal, or to go together."""

    def __init__(self, tensors: RankTensors, refuse: Callable[[str, str], ConvertError]) -> None:
        super().__init__()
        self._tensors = tensors
        self._refuse = refuse

    def of(self, path: str, values: dict[int, Any]) -> Any:
        """Return what the values of some ranks are together.

        Raises:
            ConvertError: they do not go together.
        """
        rank, first = next(iter(values.items()))
        kind = _kind(first)
        for other, value in values.items():
            if _kind(value) is not kind:
                kinds = f"{_words(first)} and {_words(value)}"
                raise self._refuse(path, f"ranks {rank} and {other} have different values: {kinds}")
        if kind is torch.Tensor:
            return self._tensors.of(path, values)
        if not isinstance(first, dict | list | tuple):
            self._compare(path, values)
        return super().of(path, values)

    def alike(self, path: str, values: dict[int, Any]) -> dict[int, Any]:
        rank, first = next(iter(values.items()))
        for other, value in values.items():
            if len(value) != len(first):
                lengths = f"{len(first)} and {len(value)}"
                raise self._refuse(path, f"ranks {rank} and {other} have {lengths} values in it")
        return values

    def _compare(self, key: str, values: dict[int, Any]) -> None:
        rank, first = next(iter(values.items()))
        for other, value in values.items():
            if value is not first and value != first and (value == value or first == first):
                raise self._refuse(
                    key,
                    f"ranks {rank} and {other} have different values ({_words(first)} and "
                    f"{_words(value)}), and nothing says how they go together",
                )


def _kind(value: Any) -> type:
    """Return the type by which values are put together."""
    for kind in (torch.Tensor, Mapping):
        if isinstance(value, kind):
            return kind
    return type(value)


def _words(value: Any) -> str:
    """Return a number or a short text as it is, of anything else the type."""
    text = repr(value) if isinstance(value, int | float | str | bytes | None) else ""
    return text if 0 < len(text) <= _SHOWN else type(value).__name__
