"""Whatever is nested in whatever, over shared storages: stock's bytes, and stock's values."""

from __future__ import annotations

import tempfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import loading
from support.corpus import FORMATS, LEGACY_DTYPES, Case, noise
from support.forms import FULL
from support.identity import TARGETS, both, digest, fast, saved, stock
from support.nests import differing

import fastserial
from fastserial.checksums import CrcLedger, joined_crc
from fastserial.engines import survey

EXAMPLES = settings(
    max_examples=1000 if FULL else 30,
    derandomize=not FULL,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]
# Around those where a record begins another block or page, or is copied with others.
SIZES = st.one_of(
    st.integers(0, 70),
    st.sampled_from([512, 4096, 8192, 65_536, 1 << 20]).flatmap(
        lambda n: st.integers(n - 130, n + 130)
    ),
)
ENGINES = [one.name for one in survey() if one.missing is None and one.name != "deepspeed"]
OPTIONS = st.fixed_dictionaries(
    {
        "small_file": st.sampled_from([0, 1 << 20]),
        "direct": st.sampled_from([True, False, "auto"]),
        "block_size": st.sampled_from([4096, 65_536, 1 << 20]),
        "queue_depth": st.integers(1, 8),
        "threads": st.integers(1, 4),
        "durable": st.booleans(),
        "engine": st.sampled_from(ENGINES),
    }
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(),
    st.text(max_size=300),
)
WITH_BYTES = PLAIN | st.binary(max_size=300)  # which weights_only refuses
NAMES = st.text(max_size=9).map("é{}".format)
KEYS = st.one_of(st.text(max_size=9), st.integers(0, 300), st.tuples(st.integers(), st.text()))


@st.composite
def storages(draw: Any) -> torch.Tensor:
    """A tensor over the whole of a new storage."""
    dtype = draw(st.sampled_from(LEGACY_DTYPES))
    torch.manual_seed(draw(st.integers(0, 99)))
    count = draw(SIZES) // dtype.itemsize
    return noise(count * dtype.itemsize, dtype)


@st.composite
def views(draw: Any, wholes: list[torch.Tensor]) -> torch.Tensor:
    """A tensor over one of these storages, which others may share."""
    whole = draw(st.sampled_from(wholes))
    start = draw(st.integers(0, whole.numel()))
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 40))
    step = draw(st.integers(0, 3))
    last = start + max(0, rows - 1) + max(0, columns - 1) * step
    if last >= whole.numel():
        return whole[start:]
    tensor = whole.as_strided((rows, columns), (1, step), start)
    if whole.numel() > 10_000 and draw(st.booleans()):
        tensor = whole[start % 4 : 10_000].unfold(0, 40, 40).view(-1, 8, 5)
        tensor = tensor.permute(draw(st.permutations(range(3))))[:: draw(st.integers(1, 3))]
    if draw(st.booleans()) and tensor.is_floating_point():
        return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    return tensor


@st.composite
def named(draw: Any) -> dict[str, torch.Tensor]:
    """Tensors by their names, some of which share storages."""
    wholes = draw(st.lists(storages(), min_size=1, max_size=4))
    found: dict[str, torch.Tensor] = draw(st.dictionaries(NAMES, views(wholes), max_size=6))
    return found


@st.composite
def indices(draw: Any, shape: torch.Size) -> tuple[Any, ...]:
    """What a part of a tensor is asked for with."""
    found: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if size and draw(st.booleans()):
            found.append(draw(st.integers(-size, size - 1)))
        else:
            ends = st.none() | st.integers(0, size + 1)
            found.append(slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1, 2, 3]))))
    if draw(st.booleans()):
        found.append(draw(st.sampled_from([..., None])))
    return tuple(found)


@st.composite
def states(draw: Any, plain: st.SearchStrategy[Any] = WITH_BYTES) -> Any:
    """Containers in containers, of tensors that share storages, and of plain values."""
    wholes = draw(st.lists(storages(), min_size=1, max_size=5))
    leaves = st.one_of(plain, views(wholes), views(wholes))
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=5),
                st.lists(inner, max_size=3).map(tuple),
                st.dictionaries(KEYS, inner, max_size=5),
                st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
            ),
            max_leaves=25,
        )
    )


@EXAMPLES
@given(
    live=states(),
    options=OPTIONS,
    fmt=st.sampled_from(FORMATS),
    protocol=st.integers(2, 5),
    target=st.sampled_from(["path", "path_over_longer_file", "file", "file_middle", "file_append"]),
)
def test_a_save_writes_stocks_bytes(
    live: Any, options: dict[str, Any], fmt: str, protocol: int, target: str
) -> None:
    case = Case("drawn", lambda: live, {"pickle_protocol": protocol})
    with tempfile.TemporaryDirectory() as folder:
        both(case, fmt, TARGETS[target], Path(folder), options, live=live)


@EXAMPLES
@given(
    live=states(),
    options=OPTIONS,
    fmt=st.sampled_from(FORMATS),
    weights_only=st.booleans(),
    verify=st.booleans(),
)
def test_a_load_gives_stocks_values(
    live: Any,
    options: dict[str, Any],
    fmt: str,
    weights_only: bool,
    verify: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "f.pt")
        with stock():
            torch.save(live, path, _use_new_zipfile_serialization=fmt == "zip")
        with loading.forced(monkeypatch, 5000):
            want = loading.both(
                lambda: torch.load(path, weights_only=weights_only),
                {**options, "verify_on_load": verify},
            )
        assert weights_only or want.error is None  # stock refuses `bytes` then
        if want.error is None:
            assert digest(want.value) == digest(live)


@EXAMPLES
@given(live=states(PLAIN), options=OPTIONS, fmt=st.sampled_from(FORMATS))
def test_tools_agree_about_what_was_saved(live: Any, options: dict[str, Any], fmt: str) -> None:
    """It is whole, and converted to a zip it holds the same."""
    with tempfile.TemporaryDirectory() as folder:
        path, converted = Path(folder, "f.pt"), Path(folder, "g.pt")
        with fast(**options):
            torch.save(live, path, _use_new_zipfile_serialization=fmt == "zip")
        assert fastserial.verify(path).ok
        fastserial.convert(path, converted)
        with stock():
            assert digest(torch.load(converted)) == digest(live)


@EXAMPLES
@given(
    live=named(),
    options=OPTIONS,
    fmt=st.sampled_from(FORMATS),
    verify=st.booleans(),
    data=st.data(),
)
def test_single_tensors_parts_of_them_and_into_others(
    live: dict[str, torch.Tensor],
    options: dict[str, Any],
    fmt: str,
    verify: bool,
    data: st.DataObject,
) -> None:
    """`open` gives what is in the file, and `load_into` fills it in, whatever the strides."""
    live["with gaps"] = torch.arange(504.0).view(9, 8, 7).permute(2, 0, 1)[:, ::2]
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder), live, fmt)
        target = {key: to_fill(data, tensor) for key, tensor in live.items()}
        with fastserial.options(**options):
            # an explicit wish for checksums is an error where there are none
            fastserial.load_into(target, path, verify=verify and fmt == "zip")
            with fastserial.open(path) as file:
                assert file.keys() == list(file) == list(live)
                assert len(file) == len(live)
                for key, tensor in live.items():
                    assert key in file
                    assert not differing(target[key], tensor), key
                    assert not differing(file.get_tensor(key), tensor.detach()), key
                    part = file.get_slice(key)
                    assert (part.get_shape(), part.dtype) == (list(tensor.shape), tensor.dtype)
                    for _ in range(3):
                        index = data.draw(indices(tensor.shape))
                        assert not differing(part[index], tensor.detach()[index]), (key, index)


def to_fill(data: st.DataObject, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of that shape to fill: contiguous, turned, or with gaps."""
    shape, kind = tensor.shape, data.draw(st.sampled_from(["plain", "turned", "gaps"]))
    if kind == "turned":
        return torch.zeros(shape[::-1], dtype=tensor.dtype).permute(*range(len(shape))[::-1])
    if kind == "gaps":
        return torch.zeros((*shape, 3), dtype=tensor.dtype)[..., 1]
    return torch.zeros(shape, dtype=tensor.dtype)


@EXAMPLES
@given(
    live=named(),
    fmt=st.sampled_from(FORMATS),
    shard_nbytes=st.sampled_from([1, 48, 1000, 100_000, 1 << 30]),
)
def test_from_container_to_container(
    live: dict[str, torch.Tensor], fmt: str, shard_nbytes: int
) -> None:
    """Through all of them, also where a tensor is larger than a file may be, or empty."""
    live = {key: one for key, one in live.items() if one.dtype is not torch.complex128}
    with tempfile.TemporaryDirectory() as name, fastserial.options(durable=False):
        source, folder = saved(Path(name), live, fmt), Path(name)
        many, back = folder / "many", folder / "back.pt"
        fastserial.convert(source, folder / "x.safetensors", copy_shared=True)
        fastserial.convert(folder / "x.safetensors", folder / "dcp", "dcp")
        fastserial.convert(folder / "dcp", many, copy_shared=True, shard_nbytes=shard_nbytes)
        fastserial.convert(many, back)
        for path in (folder / "x.safetensors", folder / "dcp", back, *many.glob("*.safetensors")):
            assert fastserial.verify(path).ok, path
        assert safetensors.load_file(folder / "x.safetensors").keys() == live.keys()
        held = [safetensors.load_file(file) for file in sorted(many.glob("*.safetensors"))]
        assert all(sum(map(nbytes, one.values())) <= shard_nbytes for one in held if len(one) > 1)
        with stock():
            found = torch.load(back)
        assert found.keys() == live.keys()
        assert not differing(found, live)


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes


@given(data=st.binary(min_size=2, max_size=60), draw=st.data())
def test_checksums_of_pieces_that_overlap(data: bytes, draw: st.DataObject) -> None:
    """A load may read bytes of a record twice: what is known of it is right, or not known yet."""
    ledger, ends = CrcLedger([len(data)], [None]), st.integers(0, len(data))
    for _ in range(draw.draw(st.integers(1, 12))):
        start, stop = sorted((draw.draw(ends), draw.draw(ends)))
        if start < stop:
            ledger.add(0, start, stop - start, zlib.crc32(data[start:stop]))
    crc, known = joined_crc(ledger.pieces())
    assert crc == zlib.crc32(data[:known])
