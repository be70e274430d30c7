"""Storages that other threads may resize while they are saved."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from fastserial.errors import StorageChangedError
from fastserial.memory.storages import other_threads, storage_batch


def test_a_forked_child_is_alone() -> None:
    """The threads of its parent are not there: nobody pays for what they might do."""
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    assert other_threads()
    pid = os.fork()
    if not pid:
        alone = not other_threads()
        own = threading.Thread(target=go_on.wait, daemon=True)
        own.start()
        os._exit(0 if alone and other_threads() else 1)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("nbytes", [0, 99, 101])
def test_a_batch_notices_a_resized_storage(nbytes: int) -> None:
    """Smaller or larger; the text of small storages is copied by few calls."""
    storages = [torch.full((100,), i, dtype=torch.uint8).untyped_storage() for i in range(3)]
    batch = storage_batch(storages)
    assert batch.texts(1, 3) == [bytes([1]) * 100, bytes([2]) * 100]
    storages[1].resize_(nbytes)
    with pytest.raises(StorageChangedError):
        batch.texts(0, 3)
    assert batch.texts(2, 3) == [bytes([2]) * 100]
