"""Mutated pickles, loaded by stock torch and by fastserial: the same value, or the same error.

    cd tests; python -m support.mutated_pickles 100000 [FIRST]

loads as many mutants and prints what differs; `loading/test_unpickler.py` has the short form.
Compared are the value, the class of an error, memory (at most 64 MiB more than stock), and time (at
most 2 s more than ten times stock's). An input that ends the process, or takes two minutes, is
tried again with stock alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickletools
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastserial
from support.corpus import saveable
from support.identity import digest, saver, stock
from support.limits import peak

MORE_BYTES = 64 << 20
TIMES, MORE_SECONDS = 10, 2.0
_ENDS_AFTER = 120.0
_TRIES = 3  # a busy machine takes its time, and memory that nobody wrote to differs now and then
_LARGEST, _MOST_RECORDS = 100_000, 40  # of a file that is mutated
_OPCODES = b"(t\x85\x86\x87)]}N\x88\x89aesuRbQqhKMJGXjrc\x8a.\x81o\x93i0"
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"small_file": 0, "direct": False, "block_size": 65536, "threads": 1, "queue_depth": 1},
)


class Base(NamedTuple):
    """The records of a checkpoint, and where the opcodes of its pickle begin."""

    pickle: bytes
    records: dict[str, bytes]
    opcodes: list[int]


@functools.cache
def bases() -> list[Base]:
    """Return what is mutated: all small files of the corpus."""
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), stock():
        warnings.simplefilter("ignore")
        path = os.path.join(folder, "archive.pt")
        for case, fmt in saveable(loads=False):
            if fmt != "zip" or case.large:
                continue
            saver(case, fmt, case.build())(path)
            if os.path.getsize(path) > _LARGEST:
                continue
            with contextlib.suppress(RuntimeError):  # stock's own reader does not take all
                reader = torch._C.PyTorchFileReader(path)
                names = reader.get_all_records()
                if len(names) <= _MOST_RECORDS:
                    records = {name: bytes(reader.get_record(name)) for name in names}
                    pickled = records.pop("data.pkl")
                    found.append(Base(pickled, records, _starts(pickled)))
    return found


def _starts(pickled: bytes) -> list[int]:
    return [at for _, _, at in pickletools.genops(pickled) if at is not None][1:]


def _bytes_changed(base: Base, dice: random.Random) -> bytes:
    mutant = bytearray(base.pickle)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(2, max(3, len(mutant)))
        kind = dice.random()
        if at >= len(mutant):
            break
        if kind < 0.4:
            mutant[at] = dice.choice(_OPCODES)
        elif kind < 0.6:
            mutant[at] = dice.randrange(256)
        elif kind < 0.8:
            mutant[at:at] = bytes([dice.choice(_OPCODES)])
        else:
            del mutant[at : at + dice.randrange(1, 9)]
    return bytes(mutant)


def _opcodes_changed(base: Base, dice: random.Random) -> bytes:
    """Remove, repeat, replace and insert whole opcodes, some of them of another pickle."""
    parts = _parts(base)
    others = _parts(dice.choice(bases()))
    for _ in range(dice.choice((1, 1, 2, 3, 6))):
        at = dice.randrange(len(parts))
        match dice.randrange(5):
            case 0:
                del parts[at]
            case 1:
                other = dice.randrange(len(others))
                parts[at:at] = others[other : other + dice.randrange(1, 12)]
            case 2:
                parts[at] = dice.choice(others)
            case 3:
                parts[at] = dice.choice(_PIECES)
            case 4:
                parts.insert(at, dice.choice(_PIECES))
        if not parts:
            break
    return b"\x80\x02" + b"".join(parts) + b"."


def _parts(base: Base) -> list[bytes]:
    ends = [*base.opcodes[1:], len(base.pickle)]
    return [base.pickle[at:end] for at, end in zip(base.opcodes, ends, strict=True)]


_STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03tQ"
)
_ORDERED = b"ccollections\nOrderedDict\n)R"
_HUGE = b"\x8a\x05\x00\x00\x00\x00\x10"  # 2 ** 36


def _tensor(size: bytes, stride: bytes) -> bytes:
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\x00" + size + stride
        + b"\x89" + _ORDERED + b"tR"
    )  # fmt: skip


# What a generated pickle consists of: with how many values it takes from the stack, and leaves.
_MAKES = (
    b"N", b"\x88", b"\x89", b"K\x00", b"K\x01", b"K\x03", b"G" + bytes(8), b"}", b"]", b")",
    b"X\x01\x00\x00\x00a", b"X\x06\x00\x00\x00extend", b"X\x06\x00\x00\x00append",
    b"X\x07\x00\x00\x00storage", b"\x8a\x01\x02", _ORDERED, _STORAGE, b"ctorch\nfloat32\n",
    b"ctorch\nSize\n", b"ctorch\nSize\n]K\x01a\x85R", b"ccollections\nOrderedDict\n",
    b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_parameter\n",
    _tensor(b"K\x03\x85", b"K\x01\x85"), _tensor(_HUGE + b"\x85", b"K\x00\x85"),
    b"ctorch._utils\n_rebuild_parameter\n" + _tensor(b"K\x02\x85", b"K\x01\x85") + b"\x88"
    + _ORDERED + b"\x87R",
)  # fmt: skip
_TAKES = {
    b"a": (2, 1), b"s": (3, 1), b"b": (2, 1), b"R": (2, 1), b"Q": (1, 1), b"\x85": (1, 1),
    b"\x86": (2, 1), b"\x87": (3, 1), b"q\x00": (1, 1), b"q\x01": (1, 1),
}  # fmt: skip
_GETS = (b"h\x00", b"h\x01")
_CLOSES = {b"t": 0, b"u": 1, b"e": 1}  # takes what follows the last mark, and as many before it
_PIECES = (*_MAKES, *_TAKES, *_GETS, *_CLOSES, b"(")


def _generated(base: Base, dice: random.Random) -> bytes:
    """Make a pickle of random pieces that nearly always find their values on the stack."""
    parts, depths, put = [b"\x80\x02"], [0], set[bytes]()
    for _ in range(dice.randrange(3, 25)):
        wild = dice.random() < 0.02
        choices = [*dice.sample(_MAKES, 4), b"("]
        choices += [op for op, (need, _) in _TAKES.items() if wild or depths[-1] >= need]
        choices += [op for op in _GETS if wild or b"q" + op[1:] in put]
        if len(depths) > 1 or wild:
            choices += [op for op, below in _CLOSES.items() if wild or depths[-2:][0] >= below] * 3
        piece = dice.choice(choices)
        parts.append(piece)
        if piece == b"(":
            depths.append(0)
        elif piece in _CLOSES:
            if len(depths) > 1:
                depths.pop()
            depths[-1] += piece == b"t"
        else:
            need, left = _TAKES.get(piece, (0, 1))
            depths[-1] = max(0, depths[-1] - need) + left
            put.update({piece} & _TAKES.keys())
    return b"".join(parts) + b"."


_KINDS: tuple[Callable[[Base, random.Random], bytes], ...] = (
    _bytes_changed, _opcodes_changed, _generated,
)  # fmt: skip


class Mutant(NamedTuple):
    """A checkpoint with another pickle.

    Attributes:
        pickle: its pickle.
        records: its other records.
        options: with which it is loaded.
    """

    pickle: bytes
    records: dict[str, bytes]
    options: dict[str, Any]

    def write(self, path: Path) -> None:
        """Make the file, by torch's own writer."""
        path.unlink(missing_ok=True)
        writer = torch._C.PyTorchFileWriter(str(path))
        writer.write_record("data.pkl", self.pickle, len(self.pickle))
        for name, data in self.records.items():
            if name != "version" and not name.startswith(".data/"):
                writer.write_record(name, data, len(data))
        writer.write_end_of_file()


def mutant(seed: int) -> Mutant:
    """Return the same checkpoint for the same number."""
    dice = random.Random(seed)
    base = dice.choice(bases())
    kind = _KINDS[seed % len(_KINDS)]
    records = dict(base.records)
    if kind is _generated:
        records = {"data/0": bytes(range(12)), "byteorder": b"little"}
    return Mutant(kind(base, dice), records, OPTIONS[seed // len(_KINDS) % len(OPTIONS)])


# -- comparison ----------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a load gave, and what it cost."""

    value: str | None
    error: type[BaseException] | None
    nbytes: int
    seconds: float


def _seen(load: Callable[[], Any]) -> Seen:
    found: list[Any] = []
    errors: list[type[BaseException]] = []

    def run() -> None:
        try:
            found.append(load())
        except Exception as error:
            errors.append(type(error))

    # those of a load that failed; torch 2.15 keeps none
    getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()
    began = time.perf_counter()
    nbytes = peak(run)
    seconds = time.perf_counter() - began
    if errors:
        return Seen(None, errors[0], nbytes, seconds)
    try:
        value = digest(found[0])
    except Exception as error:  # a value that cannot be pickled again
        value = f"{type(found[0])}, {type(error)}"
    return Seen(value, None, nbytes, seconds)


def compare(path: Path, seed: int) -> tuple[str, str | None]:
    """Load one mutant both ways.

    Returns:
        What stock did, `loaded` or the name of an error, and what differs: None if nothing does.
    """
    made = mutant(seed)
    made.write(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(_TRIES):
            theirs = _seen(lambda: torch.load(path, weights_only=True))
            with fastserial.options(**made.options):
                ours = _seen(lambda: fastserial.load(path, weights_only=True))
            found = _difference(theirs, ours)
            if found is None:
                break
    return "loaded" if theirs.error is None else theirs.error.__name__, found


def _difference(theirs: Seen, ours: Seen) -> str | None:
    if (theirs.error is None) != (ours.error is None):
        return f"stock {theirs.error or 'loads'}, fastserial {ours.error or 'loads'}"
    if theirs.error is not None and not issubclass(ours.error or object, theirs.error):
        return f"stock {theirs.error}, fastserial {ours.error}"
    if theirs.value != ours.value:
        return "value"
    if ours.nbytes > theirs.nbytes + MORE_BYTES:
        return f"memory: {ours.nbytes}, stock {theirs.nbytes}"
    if ours.seconds > TIMES * theirs.seconds + MORE_SECONDS:
        return f"time: {ours.seconds} s, stock {theirs.seconds} s"
    return None


# -- the long form -------------------------------------------------------------------------------


def _work(first: int, stop: int, progress: str, only_stock: bool) -> None:
    """Compare mutants; the number of the last one is in a file if one ends the process."""
    counts: Counter[str] = Counter()
    bases()  # takes seconds
    with tempfile.TemporaryDirectory() as folder, open(progress, "r+b", 0) as file:
        path = Path(folder) / "archive.pt"
        for seed in range(first, stop):
            os.pwrite(file.fileno(), b"%20d" % seed, 0)
            faulthandler.dump_traceback_later(_ENDS_AFTER, exit=True)
            if only_stock:
                mutant(seed).write(path)
                with contextlib.suppress(Exception):
                    torch.load(path, weights_only=True)
                continue
            outcome, difference = compare(path, seed)
            counts[outcome] += 1
            if difference is not None:
                print(f"mutant {seed}: {difference}", flush=True)
            if not seed % 1000:
                gc.collect()
    print(f"{stop - first} mutants; stock: {dict(counts.most_common())}", flush=True)


def main() -> int:
    """Compare as many mutants as the first argument says; the second is the first one's number."""
    if sys.argv[1] == "--work":
        first, stop = map(int, sys.argv[2:4])
        _work(first, stop, sys.argv[4], sys.argv[5] == "stock")
        return 0
    count = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    stop, ended = first + count, 0
    began = time.perf_counter()
    with tempfile.NamedTemporaryFile() as progress:

        def work(*span: int, who: str) -> int:
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--work",
                *map(str, span),
                progress.name,
                who,
            ]
            return subprocess.run(command, check=False).returncode

        while first < stop and work(first, stop, who="both"):
            first = int(Path(progress.name).read_bytes()) + 1
            as_stock = work(first - 1, first, who="stock")
            ended += not as_stock
            print(f"mutant {first - 1} ended the process; stock's: {bool(as_stock)}", flush=True)
    seconds = time.perf_counter() - began
    print(f"{count} mutants in {seconds:.0f} s: {count / seconds:.0f} a second")
    return 1 if ended else 0


if __name__ == "__main__":
    sys.exit(main())
