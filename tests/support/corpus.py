"""Named objects that people save with ``torch.save``, to compare files byte for byte.

Builders are seeded: two calls give equal objects. Legacy files hold memory addresses as keys,
so a comparison saves one live object on both sides (see ``identity.py``).
Classes that get pickled live at module level: reading needs this file importable as ``corpus``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib.util
import io
import math
import os
import pathlib
import pickle
import random
import re
import tempfile
import types
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

TORCH: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]
FORMATS = ("zip", "legacy")
KIB, MIB = 1 << 10, 1 << 20
PICKLE_MODULES = {
    "dill": lambda: importlib.import_module("dill"),
    # The pure-Python pickler calls back in another rhythm than the C one.
    "python": lambda: types.SimpleNamespace(
        __name__="python",
        Pickler=pickle._Pickler,
        dump=pickle._dump,  # type: ignore[attr-defined]
    ),
}
Raises = type[BaseException] | tuple[type[BaseException], ...]
# What pickle raises for a local or lambda moved between Python releases.
UNPICKLABLE: Raises = (AttributeError, pickle.PicklingError, TypeError)


@dataclass(frozen=True)
class Case:
    """One object and how to save it."""

    name: str
    builder: Callable[[], Any]
    save: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``torch.save``; ``pickle_module`` is a key of ``PICKLE_MODULES``."""
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered around the save."""
    formats: tuple[str, ...] = FORMATS
    raises: Mapping[str, Raises] = field(default_factory=dict)
    """Per format, what stock raises."""
    loads: tuple[str, ...] = FORMATS
    """Formats in which stock reads back an equal value."""
    since: tuple[int, int] = (2, 6)
    needs: tuple[str, ...] = ()
    """Modules without which the case is skipped."""
    fresh_storages: bool = False
    """Pickling makes new storages, so two legacy files differ in their keys."""
    large: bool = False
    portable: bool = True
    """Loads in other torch and Python releases, too."""

    def build(self) -> Any:
        """A new object, equal to every other one of this case."""
        seed = zlib.crc32(self.name.encode())
        state, np_state = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            try:
                return self.builder()
            finally:
                random.setstate(state)
                np.random.set_state(np_state)

    def options(self, fmt: str) -> dict[str, Any]:
        """Keyword arguments for ``torch.save`` in this format."""
        options = dict(self.save)
        if "pickle_module" in options:
            options["pickle_module"] = PICKLE_MODULES[options["pickle_module"]]()
        return {**options, "_use_new_zipfile_serialization": fmt == "zip"}

    def missing(self) -> str | None:
        """Why this case cannot run here, if it cannot."""
        if self.since > TORCH:
            return f"needs torch {self.since[0]}.{self.since[1]}"
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"needs {', '.join(lacking)}" if lacking else None


CASES: dict[str, Case] = {}
Builder = Callable[[], Any]


def add(name: str, builder: Builder, *, raises: Any = None, **fields: Any) -> None:
    """Register a case; ``raises`` may be one type for all its formats."""
    assert name not in CASES, name
    formats: tuple[str, ...] = fields.get("formats", FORMATS)
    per_format = raises if isinstance(raises, Mapping) else {f: raises for f in formats if raises}
    CASES[name] = Case(name, builder, raises=per_format, **fields)


def case(name: str, **fields: Any) -> Callable[[Builder], Builder]:
    """Decorate a builder."""

    def register(builder: Builder) -> Builder:
        add(name, builder, **fields)
        return builder

    return register


def noise(nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bytes, seen as ``dtype``; also for dtypes that have no kernels."""
    high = 2 if dtype is torch.bool else 256
    source = torch.randint(0, high, (nbytes,), dtype=torch.uint8)
    out = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
    out.untyped_storage().copy_(source.untyped_storage())
    return out


# --- dtypes -----------------------------------------------------------------------------------

# Legacy readers find a storage class by name; newer dtypes have none.
LEGACY_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
LEGACY_DTYPES += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
LEGACY_DTYPES += [torch.complex64, torch.complex128]


def _newer_dtypes() -> list[torch.dtype]:
    """What this torch has beside them, but quantized ones and those of less than a byte."""
    found = {str(d)[6:]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    left_out = {str(dtype)[6:] for dtype in LEGACY_DTYPES}
    return [
        dtype
        for name, dtype in sorted(found.items())
        if name not in left_out
        and not name.startswith(("qint", "quint"))
        and re.fullmatch(r"u?int[1-7]", name) is None
    ]


add("dtypes", lambda: [noise(96, dtype) for dtype in LEGACY_DTYPES])
add(
    "dtypes_new",
    lambda: [noise(96, dtype) for dtype in _newer_dtypes()],
    loads=("zip",),
    portable=False,
)


@case("quantized", portable=False)
def _() -> Any:
    kinds = (torch.qint8, torch.quint8, torch.qint32)
    tensors = [torch.quantize_per_tensor(torch.randn(9, 5), 0.1, 3, dtype) for dtype in kinds]
    scales, zeros = torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.int64)
    per_channel = torch.quantize_per_channel(torch.randn(4, 6), scales, zeros, 0, torch.qint8)
    return [*tensors, per_channel, tensors[0].storage()]


# --- shapes and sizes -------------------------------------------------------------------------


@case("empty_between_data")
def _() -> Any:
    return [noise(100), torch.empty(0), noise(5000), torch.empty(0), torch.empty(0)]


add("bytes_5MB", lambda: noise(5_000_000))


def _straddle(boundary: int, delta: int) -> Any:
    """Two tensors; the first one's data ends ``delta`` bytes past the boundary in the file.

    Its 16-byte data descriptor then lies before, across or behind the boundary.
    """
    probe = io.BytesIO()
    torch.save([noise(64), noise(99)], probe)
    with zipfile.ZipFile(probe) as archive:
        header = archive.getinfo("archive/data/0").header_offset
    names = probe.getvalue()[header + 26 : header + 30]
    start = header + 30 + int.from_bytes(names[:2], "little") + int.from_bytes(names[2:], "little")
    return [noise(boundary + delta - start), noise(3000)]


# Meant for archive names of seven letters ("archive"), in the zip format.
for _boundary, _delta in ((4096, -8), (4096, 0), (MIB, -9), (MIB, 0), (MIB, 1)):
    add(
        f"straddle_{_boundary}_{_delta:+d}",
        functools.partial(_straddle, _boundary, _delta),
        portable=False,
    )


@case("mixed_sizes_20MB", large=True, portable=False)
def _() -> Any:
    sizes = (9 * MIB, 3, 4 * MIB - 777, 1, 4096, 6 * MIB + 5, 70_000, 512)
    return {f"layer.{i}": noise(n) for i, n in enumerate(sizes)}


@case("small_tensors_1000", portable=False)
def _() -> Any:
    return {f"block.{i}.weight": torch.randn(1 + i % 7) for i in range(1000)}


# Content that looks like a data descriptor: torch folds it into the archive's id (a quirk).
@case("descriptor_signatures_mixed")
def _() -> Any:
    mark = torch.tensor(list(b"PK\x07\x08"), dtype=torch.uint8)
    # The second one carries the mark where a block could begin, not the storage.
    inner = noise(3 * 4096)
    inner[4096:4100] = mark
    inner[64 * KIB % 4096 : 64 * KIB % 4096 + 4] = mark
    return [torch.cat([mark, noise(n)]) for n in (0, 4, 5, 600)] + [inner, torch.cat([mark, mark])]


@case("descriptor_signatures_packed")
def _() -> Any:
    mark = torch.tensor(list(b"PK\x07\x08"), dtype=torch.uint8)
    return [torch.cat([mark, noise(n)]) for n in (0, 4, 5, 600, 65_000)] + [noise(3000)]


# --- shared storages --------------------------------------------------------------------------


@case("views")
def _() -> Any:
    x = torch.arange(60.0).reshape(6, 10)
    views = {"base": x, "row": x[2], "slice": x[1:4, 2:7], "t": x.t(), "step": x[::2, ::3]}
    a = np.arange(12, dtype=np.float32)
    same_memory = {f"same{n}": torch.from_numpy(a) for n in range(2)}
    # torch 2.6 writes key 10 before key 2.
    return views | same_memory | {f"n{n}": torch.full((3,), n) for n in range(23)}


@case("same_memory_two_dtypes", raises=RuntimeError)
def _() -> Any:
    a = np.arange(12, dtype=np.float32)
    return {"first": noise(5000), "a": torch.from_numpy(a), "b": torch.from_numpy(a.view(np.int32))}


add("storage_untyped", lambda: torch.randn(10).untyped_storage(), loads=("zip",))


add("storage_typed", lambda: [torch.randn(10).storage(), torch.arange(5).storage()])


def _resized(nbytes: int) -> Any:
    x = torch.arange(3.0)
    x.untyped_storage().resize_(nbytes)
    if nbytes > 12:
        x.untyped_storage()[12:].fill_(9)
    return x


add("storage_resized_smaller", lambda: _resized(4), loads=())
add("storage_resized_larger", lambda: _resized(5000), portable=False)


@case("storage_resized_among_others", loads=())
def _() -> Any:
    return [noise(300), _resized(0), noise(4000), _resized(13), _resized(0)]


# --- memory that torch did not allocate -------------------------------------------------------


@case("memory_of_others")
def _() -> Any:
    return [
        torch.from_numpy(np.arange(9.0)),
        torch.from_numpy(np.ones((3, 4), order="F")),
        torch.frombuffer(random.randbytes(5000), dtype=torch.uint8),  # read only
        torch.randn(3000).share_memory_(),
        nn.Linear(3, 3).share_memory().state_dict(),
    ]


@case("frombuffer_odd_address_float32")
def _() -> Any:
    # Every fourth byte stays small: no NaN, which an unaligned copy may not keep.
    buffer = bytearray(random.randbytes(2 * MIB + 1))
    return torch.frombuffer(buffer, dtype=torch.float32, offset=1, count=MIB // 2 - 3)


def _mapped(read_only: bool) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        file.write(random.randbytes(80_000))
        file.flush()
        if read_only:
            return torch.from_numpy(np.memmap(file.name, mode="r", offset=3, shape=(70_001,)))
        return torch.from_file(file.name, shared=True, size=20_000)


add("mapped", lambda: [_mapped(False), _mapped(True)], portable=False)


# --- kinds of tensors -------------------------------------------------------------------------


@case("meta_tensors")
def _() -> Any:
    return [torch.empty(3, 4, device="meta"), torch.ones(2), torch.empty(0, device="meta")]


@case("meta_storage", raises=NotImplementedError)
def _() -> Any:
    return [noise(4000), torch.empty(3, device="meta").untyped_storage()]


@case("conj_and_neg_bits")
def _() -> Any:
    x = torch.randn(5, dtype=torch.complex64)
    return [x.conj(), x, torch.randn(5, dtype=torch.complex64).conj().imag]


@case("sparse")
def _() -> Any:
    x = torch.eye(8)
    blocks = [x.to_sparse_bsr((2, 4)), x.to_sparse_bsc((2, 4))]
    return [x.to_sparse(), x.to_sparse_csr(), x.to_sparse_csc(), *blocks]


@case("nested_jagged", portable=False, fresh_storages=True)
def _() -> Any:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


@case("subclasses")
def _() -> Any:
    plain = [torch.randn(3).as_subclass(Plain), nn.Parameter(torch.randn(2).as_subclass(Plain))]
    x = torch.randn(3).as_subclass(Plain)
    x.note, x.friend = "größe", torch.ones(2)  # type: ignore[attr-defined]
    y = torch.randn(2)
    y.tag = {"on": "a plain tensor"}  # type: ignore[attr-defined]
    return [*plain, x, y]


# --- contexts and options ---------------------------------------------------------------------


@contextlib.contextmanager
def without_crc() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


@contextlib.contextmanager
def aligned(nbytes: int) -> Iterator[None]:
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = nbytes
    try:
        yield
    finally:
        config.save.storage_alignment = before


NO_SKIP = {"legacy": RuntimeError}  # stock refuses skip_data in the legacy format


def _mixed() -> Any:
    base = torch.randn(100)
    return {
        "w": torch.randn(70, 30),
        "e": torch.empty(0),
        "v": base[3:9],
        "b": base,
        "n": noise(9000),
    }


add("skip_data", _mixed, context=torch.serialization.skip_data, raises=NO_SKIP, loads=())
add("no_crc", _mixed, context=without_crc, portable=False)
add("no_crc_signature", lambda: CASES["descriptor_signatures_mixed"].builder(), context=without_crc)
for _n in (100, 4096):
    add(
        f"alignment_{_n}",
        _mixed,
        context=functools.partial(aligned, _n),
        since=(2, 7),
        formats=("zip",),
        portable=False,
    )
add(
    "alignment_131072",  # does not fit the header's u16: stock's own file is broken
    lambda: torch.ones(3),
    context=functools.partial(aligned, 131072),
    since=(2, 7),
    formats=("zip",),
    loads=(),
)


def _plain() -> Any:
    return {"x": torch.arange(7.0), "s": "text", "n": [1, 2.5, None], "deep": {"y": noise(600)}}


for _protocol in (-1, 0, 1, 5):
    add(
        f"protocol_{_protocol}",
        _plain,
        save={"pickle_protocol": _protocol},
        loads=() if _protocol == 0 else FORMATS,  # protocol 0 turns the storage ids into text
        portable=_protocol != -1,
    )
add("protocol_99", _plain, save={"pickle_protocol": 99}, raises=ValueError)
add("no_byteorder", _mixed, save={"_disable_byteorder_record": True})
add("pickle_python", _plain, save={"pickle_module": "python"}, portable=False)
add("pickle_dill", _plain, save={"pickle_module": "dill"}, needs=("dill",), portable=False)
add(
    "protocol_5_large_bytes",
    lambda: [random.randbytes(3 * MIB), torch.ones(5), bytearray(200_000), np.arange(90_000)],
    save={"pickle_protocol": 5},
    portable=False,
)


# --- modules, optimizers, training state ------------------------------------------------------


class Tied(nn.Module):
    """Input and output embeddings share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.arange(50), persistent=False)


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
    )


def _trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _step in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 20)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


add("module", lambda: [_net(), Tied()], portable=False)
add("module_state_dict", lambda: Tied().state_dict())
add("module_script", lambda: torch.jit.script(nn.Linear(3, 4)), raises=(RuntimeError, TypeError))


@case("checkpoint")
def _() -> Any:
    model, optimizer, scheduler = _trained()
    return {
        "epoch": 3,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu", enabled=True).state_dict(),
        "rng": {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        },
        "args": argparse.Namespace(lr=1e-3, name="größe"),
        "loss": [0.5, math.inf],
    }


add("generator", lambda: torch.Generator().manual_seed(5), fresh_storages=True, formats=("zip",))


# --- plain Python -----------------------------------------------------------------------------


@dataclass
class Record:
    """A dataclass with tensors in it."""

    name: str
    weight: torch.Tensor
    children: list[Record] = dataclasses.field(default_factory=list)


class Color(enum.Enum):
    RED = 1
    GREEN = "g"


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


def _recursive() -> Any:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    return {"loop": loop}


def _deep(depth: int) -> Any:
    value: Any = torch.ones(1)
    for level in range(depth):
        value = [value] if level % 2 else {"v": value}
    return value


add("none", lambda: None)
add("huge_bytes", lambda: {"blob": random.randbytes(3 * MIB + 1), "t": noise(5000)}, portable=False)
add("deep_nesting", lambda: [_deep(100), _recursive()])


@case("objects")
def _() -> Any:
    kinds = [torch.float32, torch.device("cpu"), torch.device("meta"), torch.Size([2, 3])]
    return [
        *(*kinds, torch.strided, torch.max(torch.eye(3), 0), torch.__version__),
        Record("root", torch.ones(3), [Record("leaf", noise(90))]),
        Point(1, torch.randn(3)),
        Slotted(torch.ones(2), {"a": Slotted(None, noise(10))}),
        *(Color.RED, Color.GREEN, re.IGNORECASE),
        *(np.arange(7), np.random.rand(3, 4).T, np.zeros((0, 2)), np.float32(3)),
    ]


add(
    "standard_library",
    lambda: [
        collections.OrderedDict(b=1, a=torch.ones(2)),
        collections.defaultdict(list, k=[torch.ones(1)]),
        collections.Counter("hello"),
        collections.deque([1, 2], maxlen=3),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        decimal.Decimal("1.10"),
        fractions.Fraction(1, 3),
        pathlib.PurePosixPath("a/b"),
        uuid.UUID(int=7),
        functools.partial(int, base=2),
        re.compile("a+"),
        range(3),
        slice(1, 2),
        ...,
        {1, 2, 3},
        frozenset({"x"}),
        argparse.Namespace(a=1),
        ValueError("kept"),
        bytearray(b"abc"),
        io.BytesIO(b"abc"),
        math.sqrt,
        Record,
    ],
    portable=False,
)


# --- trouble while pickling -------------------------------------------------------------------


class Counting:
    """Counts how often it was pickled; its pickle does not depend on that."""

    calls = 0

    def __init__(self, payload: Any) -> None:
        self.payload = payload

    def __reduce__(self) -> Any:
        type(self).calls += 1
        return (Counting, (self.payload,))


class FillsOnPickle:
    """Changes a tensor that was pickled before it: the bytes at writing time count."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        self.tensor.fill_(42)
        return (str, ("filled",))


class SavesOnPickle:
    """Calls ``torch.save`` while being pickled by ``torch.save``."""

    def __init__(self, payload: Any) -> None:
        self.payload = payload

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        torch.save(self.payload, buffer)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "inner.pt")
            torch.save(self.payload, path)
            on_disk = pathlib.Path(path).read_bytes()
        return (Slotted, (buffer.getvalue(), on_disk))


class Raising:
    """Raises while being pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def _then_raise(error: BaseException) -> Any:
    return {"before": noise(100_000), "bad": Raising(error), "after": torch.ones(3)}


add("reduce_counts", lambda: [Counting(torch.ones(3)), Counting(5)], portable=False, loads=())
add(
    "reduce_fills_tensor",
    lambda: (lambda t: [t, FillsOnPickle(t), noise(70)])(torch.zeros(3000)),
    loads=(),
)
add("reduce_saves", lambda: [SavesOnPickle([noise(6000)]), noise(70)], loads=())
add("raise_value_error", lambda: _then_raise(ValueError("in the middle")), raises=ValueError)
add("raise_runtime_error", lambda: _then_raise(RuntimeError("mid")), raises=RuntimeError)
add("raise_os_error", lambda: _then_raise(OSError(5, "mid")), raises=OSError)
add("raise_memory_error", lambda: _then_raise(MemoryError()), raises=MemoryError)
add("raise_keyboard_interrupt", lambda: _then_raise(KeyboardInterrupt()), raises=KeyboardInterrupt)
add("raise_system_exit", lambda: _then_raise(SystemExit(3)), raises=SystemExit)
add("unpicklable_lambda", lambda: [torch.ones(2), lambda: 0], raises=UNPICKLABLE)
add("unpicklable_too_deep", lambda: _deep(100_000), raises=RecursionError)


def saveable(loads: bool = True) -> list[tuple[Case, str]]:
    """Return cases and formats that stock can save here; `loads`: and read back as they were."""
    return [
        (case, fmt)
        for case in CASES.values()
        if case.missing() is None
        for fmt in case.formats
        if fmt not in case.raises and (fmt in case.loads or not loads)
    ]


def name_of(value: Case | str) -> str:
    """Return the part of a test's name for a case or a format."""
    return value if isinstance(value, str) else value.name
