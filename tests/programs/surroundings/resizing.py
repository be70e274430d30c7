"""Save again and again while another thread resizes what is saved.

The arguments are a folder, `zip` or `legacy`, the number of tensors, bytes of each, and seconds.
Each save must go well or raise `StorageChangedError`, and what lies at the path must load.
"""

import random
import sys
import threading
import time

import torch

import fastserial
from fastserial.saving.archive import ZipArchive
from fastserial.saving.writer import FastFileWriter

folder, form, count, nbytes, seconds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
path = f"{folder}/f.pt"
fastserial.install(small_file=1 << 20, durable=False)
tensors = [torch.full((nbytes,), number % 100, dtype=torch.uint8) for number in range(count)]
torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
over, may, turn = threading.Event(), threading.Event(), threading.Lock()


def resize() -> None:
    chance = random.Random(1)
    while not over.is_set():
        may.wait()
        with turn:
            if not may.is_set():  # it waited for its turn while a save came to its end
                continue
            storage = chance.choice(tensors).untyped_storage()
            storage.resize_(0)
            time.sleep(0)
            storage.resize_(nbytes)


def sized(self, storages, _stock=ZipArchive._batch):
    """Let the resizing begin once the sizes are known: before, all is torch's."""
    batch = _stock(self, storages)
    may.set()
    return batch


def write_layout(self, *arguments, _stock=FastFileWriter.write_layout):
    may.set()
    return _stock(self, *arguments)


ZipArchive._batch = sized
FastFileWriter.write_layout = write_layout
thread = threading.Thread(target=resize, daemon=True)
thread.start()
ended = {"saved": 0, "refused": 0}
until = time.monotonic() + seconds
sys.setswitchinterval(1e-5)
while not ended["refused"] or time.monotonic() < until:
    try:
        torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
        ended["saved"] += 1
    except fastserial.StorageChangedError as error:
        ended["refused"] += path in str(error)
    may.clear()
    with turn:
        torch.load(path)
over.set()
may.set()
thread.join()
print(ended)
