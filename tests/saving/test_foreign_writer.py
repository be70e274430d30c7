"""Somebody else's FastFileWriter as the target: DeepSpeed's protocol."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.corpus import CASES, MIB, Case, noise
from support.identity import difference, fast, legacy_value, stock


class Theirs:
    """Speaks the protocol of DeepSpeed's FastFileWriter, and keeps a note of each call."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.storages: list[int] = []

    def write(self, buffer: Any) -> int:
        self.data += buffer
        return len(buffer)

    def save_torch_storage_object_list(
        self, storage_obj_list: Sequence[tuple[torch.UntypedStorage, torch.dtype]], save_size: bool
    ) -> int:
        before = len(self.data)
        for storage, dtype in storage_obj_list:
            if save_size:
                count = storage.nbytes() // dtype.itemsize
                self.data += count.to_bytes(8, "little")
            self.data += ctypes.string_at(storage.data_ptr(), storage.nbytes())
            self.storages.append(storage.nbytes())
        return len(self.data) - before

    def flush(self) -> None:
        pass


NAMES = ("checkpoint", "none", "module", "small_tensors_1000", "nested_jagged")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fmt", ["zip", "legacy"])
@pytest.mark.parametrize("name", NAMES)
def test_stock_bytes(name: str, fmt: str) -> None:
    """What stock puts into a file object."""
    case: Case = CASES[name]
    if fmt in case.raises:
        pytest.skip(f"torch cannot save it as {fmt}")
    live = case.build()
    expected, theirs = io.BytesIO(), Theirs()
    with stock(), case.context():
        torch.save(live, expected, **case.options(fmt))
    with fast(), case.context():
        torch.save(live, theirs, **case.options(fmt))
    mine, other = expected.getvalue(), bytes(theirs.data)
    if fmt == "legacy" and case.fresh_storages:  # keys are addresses
        mine, other = legacy_value(mine), legacy_value(other)
    assert difference(mine, other) is None


def test_an_error_of_theirs_comes_through() -> None:
    class Broken(Theirs):
        def save_torch_storage_object_list(self, *_: Any, **__: Any) -> int:
            raise RuntimeError("planted")

    with fast(), pytest.raises(RuntimeError, match="planted"):
        torch.save(noise(MIB), Broken(), _use_new_zipfile_serialization=False)
