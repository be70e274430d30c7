"""Coverage-guided fuzzing of the parsers with atheris; `nox -s faults` runs each for ten minutes.

    python tests/faults/fuzz_parsers.py zip -max_total_time=600

The parsers: `zip`, `legacy`, `pickle`, `safetensors`, `dcp`. An input is a file of the format, or
(every second one) choices from which `support.grammar` makes a file of up to some megabytes that
nests, repeats, deflates and overlaps. Each file goes through `inspect` (its table, its JSON) and
`verify` with the default limits. Anything but an answer or an error of a documented class is a
crash; so is a file that takes more than 1 GiB above the process's own memory, or more than 10
seconds of processor time and one for each of its MB, when it is measured again without the fuzzer
(the seconds are those of a quiet machine: beside other work, the same code takes twice as many):

    python tests/faults/fuzz_parsers.py zip --measure FILE
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

with atheris.instrument_imports(include=["none" if "--measure" in sys.argv else "fastserial"]):
    from fastserial.cli.main import app
    from fastserial.formats import container, dcp, outline, pickles, safetensors, zip_format
    from fastserial.loading import unpickler

import torch
from support import grammar
from support.damage import originals
from support.limits import peak
from torch.distributed import checkpoint

from fastserial.errors import CheckpointFileError, PickleLimitError
from fastserial.formats.pickles import Budget, Limits
from fastserial.formats.source import BytesSource, ByteStream

_FOLDER = tempfile.mkdtemp(prefix="fastserial-fuzz-")
_MEMORY = 1 << 30
_SECONDS, _SECONDS_PER_MB = 10.0, 1.0
_ADDITIONS, _ADDITIONS_TAKE = 10_000_000, 0.12  # seconds on a quiet machine


def parse_zip(data: bytes) -> None:
    """The directory and the local headers; then the commands."""
    source = BytesSource(data)
    for headers in (True, False):
        with contextlib.suppress(CheckpointFileError):
            for record in zip_format.read_directory(source, headers=headers).records:
                if not 0 < record.data_offset <= record.data_end <= len(data):
                    raise AssertionError(record)
    _whole_file(data, "x.pt")


def parse_legacy(data: bytes) -> None:
    """The five pickles and the table of storages; then the commands."""
    _whole_file(data, "x.pt")
    found = container.LegacyContainer(BytesSource(data))
    for storage in found.outline.storages.values():
        if not 0 <= (storage.offset or 0) <= (storage.offset or 0) + storage.held <= len(data):
            raise AssertionError(storage)


def parse_pickle(data: bytes) -> None:
    """The symbolic machine, the tensors in what it found, and the look at plain pickles."""
    unpickler.plain_pickle(data)
    pickles.refuse_costly(data, Limits.of(len(data)))
    budget = Budget(Limits.of(len(data)))
    outline.outline(pickles.decode(ByteStream(BytesSource(data)), budget), budget)


def parse_safetensors(data: bytes) -> None:
    """The commands, and the header."""
    _whole_file(data, "x.safetensors")
    safetensors.read_header(BytesSource(data))


def parse_dcp(data: bytes) -> None:
    """The metadata of torch.distributed.checkpoint, and the commands with its folder."""
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
    """Run the commands, as far as they end with one of their statuses."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        for words in (["inspect", "--records"], ["inspect", "--json"], ["verify"]):
            with contextlib.suppress(PickleLimitError):
                if app([*words, path], standalone_mode=False) not in (None, 0, 1, 2):
                    raise AssertionError(words)


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


class CostError(Exception):
    """A file costs more than it weighs."""


def slowness() -> float:
    """Return how many times as long as on a quiet machine Python's own work takes now."""
    began = time.process_time()
    sum(range(_ADDITIONS))
    return max(1.0, (time.process_time() - began) / _ADDITIONS_TAKE)


def measure(parser: str, data: bytes) -> str:
    """Return what was too much; empty if nothing was."""

    def parse() -> None:
        with contextlib.suppress(CheckpointFileError, PickleLimitError):
            PARSERS[parser](data)

    before = slowness()
    began = time.process_time()
    nbytes = peak(parse)
    seconds = (time.process_time() - began) / max(before, slowness())
    most = _SECONDS + _SECONDS_PER_MB * len(data) / 1e6
    what = f"{nbytes >> 20} MiB, {seconds:.1f} s for {len(data)} bytes"
    return what if nbytes > _MEMORY or seconds > most else ""


def check(parser: str, data: bytes) -> None:
    """Parse a file; if it costs too much here, ask a process without the fuzzer.

    Raises:
        CostError: it costs too much there, too.
    """
    if not measure(parser, data):
        return
    path = Path(_FOLDER, "costly")
    path.write_bytes(data)
    command = [sys.executable, __file__, parser, "--measure", str(path)]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    if again.returncode:
        kept = Path(f"costly-{parser}-{os.getpid()}-{time.time_ns()}")
        kept.write_bytes(data)
        raise CostError(f"{again.stdout}{again.stderr} ({kept})")


def main() -> None:
    """Fuzz the parser that the first argument names; the others are libFuzzer's options."""
    name, *options = sys.argv[1:]
    if options[:1] == ["--measure"]:
        what = measure(name, Path(options[1]).read_bytes())
        shutil.rmtree(_FOLDER, ignore_errors=True)
        sys.exit(what or 0)

    def one_input(data: bytes) -> None:
        is_file, data = data[:1] < b"\x80", data[1:]
        check(name, data if is_file else grammar.make(name, data))

    corpus = os.path.join(_FOLDER, "corpus")
    os.mkdir(corpus)
    inputs = [b"\0" + data for data in whole(name)] + [b"\xff" + data for data in grammar.seeds()]
    for index, data in enumerate(inputs):
        with open(os.path.join(corpus, str(index)), "wb") as file:
            file.write(data)
    limits = ["-timeout=600", "-rss_limit_mb=4096", "-max_len=16384"]
    atheris.Setup([sys.argv[0], corpus, *limits, *options], one_input)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(_FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
