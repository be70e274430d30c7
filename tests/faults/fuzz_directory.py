"""Coverage-guided fuzzing of the parsers with atheris; `nox -s faults` runs it for ten minutes.

    python tests/faults/fuzz_directory.py -max_total_time=600

Input is a whole file. Anything but an answer or a `CheckpointFileError` is a crash; libFuzzer
reports hangs (`-timeout`) and memory (`-rss_limit_mb`) by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import atheris

with atheris.instrument_imports(include=["fastserial"]):
    from fastserial.checkpoints import inspect, verify
    from fastserial.config import Config
    from fastserial.formats import dcp, safetensors, tensors
    from fastserial.formats.legacy import structure
    from fastserial.formats.zip import directory

import torch
from damage import originals
from torch.distributed import checkpoint

from fastserial.errors import CheckpointFileError, PickleLimitError
from fastserial.formats.pickles import Limits, decode
from fastserial.formats.source import BytesSource, ByteStream

_CONFIG = Config(block_size=4096, queue_depth=1, threads=1)
_LIMITS = Limits(memory=64 << 20, seconds=5, visits=100_000)
_FOLDER = tempfile.mkdtemp(prefix="fastserial-fuzz-")
_PATH = os.path.join(_FOLDER, "x.pt")


def one_input(data: bytes) -> None:
    """Let every parser have a look."""
    source = BytesSource(data)
    for headers in (True, False):
        with contextlib.suppress(CheckpointFileError):
            for record in directory.read_directory(source, headers=headers).records:
                if not 0 < record.data_offset <= record.data_end <= len(data):
                    raise AssertionError(record)
    for parse in (
        lambda: tensors.outline(decode(ByteStream(source), _LIMITS)),
        lambda: structure.read_legacy(source, _LIMITS),
        lambda: safetensors.read_header(source),
        lambda: dcp.parse(source, "x"),
    ):
        with contextlib.suppress(CheckpointFileError, PickleLimitError):
            parse()
    with open(_PATH, "wb") as file:
        file.write(data)
    with contextlib.suppress(CheckpointFileError, PickleLimitError):
        inspect.inspect(_PATH, _LIMITS)
    verify.verify(_PATH, _CONFIG)


def whole() -> Iterator[bytes]:
    """Yield a file of each format."""
    yield from originals().values()
    yield safetensors.header_bytes([("w", "float32", (3,), 12)], {"format": "pt"}) + bytes(12)
    folder = os.path.join(_FOLDER, "dcp")
    checkpoint.save({"a": torch.ones(3), "n": [1, torch.ones(2)]}, checkpoint_id=folder)
    with open(os.path.join(folder, ".metadata"), "rb") as file:
        yield file.read()


def main() -> None:
    corpus = os.path.join(_FOLDER, "corpus")
    os.mkdir(corpus)
    for index, data in enumerate(whole()):
        with open(os.path.join(corpus, f"{index}.pt"), "wb") as file:
            file.write(data)
    options = [sys.argv[0], corpus, "-timeout=20", "-rss_limit_mb=2048", "-max_len=16384"]
    atheris.Setup([*options, *sys.argv[1:]], one_input)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(_FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
