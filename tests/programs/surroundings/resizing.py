"""Save again and again while another thread resizes what is saved.

The arguments are a folder, `zip` or `legacy`, seconds, and words `COUNT:BYTES` for that many
tensors of that size. Each save must go well or raise `StorageChangedError`, and what lies at the
path must load.
"""

import random
import sys
import threading
import time

import torch

import fastserial
from fastserial.saving.archive import ZipArchive
from fastserial.saving.writer import FastFileWriter

folder, form, seconds, *sizes = sys.argv[1:]
path = f"{folder}/f.pt"
may = threading.Event()


def sized(self, storages, _stock=ZipArchive._batch):
    """Let the resizing begin once the sizes are known: before, all is torch's."""
    batch = _stock(self, storages)
    may.set()
    return batch


def write_layout(self, *arguments, _stock=FastFileWriter.write_layout):
    may.set()
    return _stock(self, *arguments)


def work(count: int, nbytes: int) -> None:
    tensors = [torch.full((nbytes,), number % 100, dtype=torch.uint8) for number in range(count)]
    torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
    may.clear()
    over, turn = threading.Event(), threading.Lock()

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

    thread = threading.Thread(target=resize, daemon=True)
    thread.start()
    ended = {"saved": 0, "refused": 0}
    until = time.monotonic() + float(seconds)
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


fastserial.install(small_file=1 << 20, durable=False)
ZipArchive._batch = sized
FastFileWriter.write_layout = write_layout
sys.setswitchinterval(1e-5)
for size in sizes:
    work(*map(int, size.split(":")))
