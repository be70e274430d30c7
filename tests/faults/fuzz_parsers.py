"""Coverage-guided fuzzing of the parsers with atheris; `nox -s faults` runs each for ten minutes.

    python tests/faults/fuzz_parsers.py zip -max_total_time=600

The parsers: `zip`, `legacy`, `pickle`, `safetensors`, `dcp`. Each gets a source of bytes. Anything
but an answer or an error of its documented classes is a crash. libFuzzer ends a run that takes more
than 20 seconds (`-timeout`) or 2 GiB (`-rss_limit_mb`) for one input.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable

import atheris

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

with atheris.instrument_imports(include=["fastserial"]):
    from fastserial.checkpoints import inspect, verify
    from fastserial.config import Config
    from fastserial.formats import container, dcp, outline, pickles, safetensors, zip_format
    from fastserial.loading import unpickler

import torch
from support.damage import originals
from torch.distributed import checkpoint

from fastserial.errors import CheckpointFileError, PickleLimitError
from fastserial.formats.source import BytesSource, ByteStream

_CONFIG = Config(block_size=4096, queue_depth=1, threads=1)
_LIMITS = pickles.Limits(memory=64 << 20, seconds=5)
_FOLDER = tempfile.mkdtemp(prefix="fastserial-fuzz-")


def parse_zip(data: bytes) -> None:
    """The directory and the local headers; then `inspect` and `verify` of the file."""
    source = BytesSource(data)
    for headers in (True, False):
        with contextlib.suppress(CheckpointFileError):
            for record in zip_format.read_directory(source, headers=headers).records:
                if not 0 < record.data_offset <= record.data_end <= len(data):
                    raise AssertionError(record)
    _whole_file(data, "x.pt")


def parse_legacy(data: bytes) -> None:
    """The five pickles and the table of storages; then `inspect` and `verify` of the file."""
    _whole_file(data, "x.pt")
    found = container.LegacyContainer(BytesSource(data), _LIMITS)
    for storage in found.outline.storages.values():
        if not 0 <= (storage.offset or 0) <= (storage.offset or 0) + storage.held <= len(data):
            raise AssertionError(storage)


def parse_pickle(data: bytes) -> None:
    """The symbolic machine, the walk over what it found, and the look at plain pickles."""
    unpickler.plain_pickle(data)
    pickles.refuse_costly(data, _LIMITS)
    outline.outline(pickles.decode(ByteStream(BytesSource(data)), pickles.Budget(_LIMITS)))


def parse_safetensors(data: bytes) -> None:
    """The header; then `inspect` and `verify` of the file."""
    _whole_file(data, "x.safetensors")
    safetensors.read_header(BytesSource(data))


def parse_dcp(data: bytes) -> None:
    """The metadata of torch.distributed.checkpoint, and `inspect` and `verify` of its folder."""
    folder = os.path.join(_FOLDER, "folder")
    os.makedirs(folder, exist_ok=True)
    for name in (".metadata", "__0_0.distcp"):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
    _look(folder)
    dcp.parse(data, "x")


def _whole_file(data: bytes, name: str) -> None:
    path = os.path.join(_FOLDER, name)
    with open(path, "wb") as file:
        file.write(data)
    _look(path)


def _look(path: str) -> None:
    with contextlib.suppress(CheckpointFileError, PickleLimitError):
        inspect.inspect(path, _LIMITS)
    verify.verify(path, _CONFIG)


def whole(parser: str) -> list[bytes]:
    """Return whole inputs of a parser, to begin with."""
    files = originals()
    if parser in ("zip", "legacy"):
        return [data for name, data in files.items() if (name == "legacy") == (parser == "legacy")]
    if parser == "safetensors":
        rows = [("w", "float32", (3,), 12), ("b", "bfloat16", (2, 2), 8)]
        return [safetensors.header_bytes(rows, {"format": "pt"}) + bytes(20)]
    if parser == "dcp":
        folder = os.path.join(_FOLDER, "dcp")
        checkpoint.save({"a": torch.ones(3), "n": [1, torch.ones(2)]}, checkpoint_id=folder)
        with open(os.path.join(folder, ".metadata"), "rb") as file:
            return [file.read()]
    source = BytesSource(files["zip"])
    record = zip_format.read_directory(source).find("data.pkl")
    found = [source.read_at(record.data_offset, record.size)] if record is not None else []
    value = {"a": [1, 2.5, (None, True)], b"b": {1: "x"}, "c": 2**70, "d": {1, 2}}
    return found + [pickle.dumps(value, protocol) for protocol in range(1, 6)]


PARSERS: dict[str, Callable[[bytes], None]] = {
    "zip": parse_zip,
    "legacy": parse_legacy,
    "pickle": parse_pickle,
    "safetensors": parse_safetensors,
    "dcp": parse_dcp,
}


def main() -> None:
    """Fuzz the parser that the first argument names; the others are libFuzzer's options."""
    name, *options = sys.argv[1:]
    parse = PARSERS[name]

    def one_input(data: bytes) -> None:
        with contextlib.suppress(CheckpointFileError, PickleLimitError):
            parse(data)

    corpus = os.path.join(_FOLDER, "corpus")
    os.mkdir(corpus)
    for index, data in enumerate(whole(name)):
        with open(os.path.join(corpus, str(index)), "wb") as file:
            file.write(data)
    limits = ["-timeout=20", "-rss_limit_mb=2048", "-max_len=16384"]
    atheris.Setup([sys.argv[0], corpus, *limits, *options], one_input)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(_FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
