"""torch.distributed.checkpoint in a world of one process, without its warnings about that."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["names_in", "read", "write"]


def write(tensors: Mapping[str, torch.Tensor], path: Path, sync_files: bool = True) -> None:
    """Save tensors to a new directory with `FileSystemWriter`."""
    with _checkpoint() as dcp:
        writer = dcp.FileSystemWriter(path, sync_files=sync_files)
        dcp.save(dict(tensors), storage_writer=writer)


def read(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Load the tensors of these names, into these tensors."""
    with _checkpoint() as dcp:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))


def names_in(path: Path) -> set[str]:
    """Return the names in a checkpoint."""
    with _checkpoint() as dcp:
        return set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


@contextmanager
def _checkpoint() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("torch.distributed.checkpoint")
