"""Pickles are read without being executed, within limits."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserial.errors import (
    CorruptCheckpointError,
    PickleLimitError,
    UnreadableCheckpointError,
)
from fastserial.formats.pickles import (
    Budget,
    Call,
    Decoded,
    Elided,
    Limits,
    Mapping,
    decode,
)
from fastserial.formats.source import BytesSource, ByteStream

PROTOCOLS = range(1, pickle.HIGHEST_PROTOCOL + 1)
CALLABLES = {
    "set": set,
    "frozenset": frozenset,
    "bytearray": bytearray,
    "complex": complex,
    "encode": lambda text, codec: text.encode(codec),
    "OrderedDict": collections.OrderedDict,
    "bytes": bytes,
}


def read(data: bytes, limits: Limits | None = None) -> Decoded:
    """Read from a source that has other bytes around the pickle."""

    class Strict(BytesSource):
        def read_at(self, offset: int, nbytes: int) -> bytes:
            assert 3 <= offset <= offset + nbytes <= 3 + len(data), "read outside of the pickle"
            return super().read_at(offset, nbytes)

    found = decode(ByteStream(Strict(b"..." + data + b"..."), 3, 3 + len(data)), Budget(limits))
    return dataclasses.replace(found, end=found.end - 3)


def real(symbol: Any) -> Any:
    """Turn symbols into the values they stand for."""
    if type(symbol) is Mapping:
        return {real(key): real(value) for key, value in symbol.items}
    if type(symbol) in (list, tuple):
        return type(symbol)(real(item) for item in symbol)
    if type(symbol) is Call:
        made = CALLABLES[symbol.function.name](*(real(item) for item in symbol.arguments))
        if symbol.appended:
            made.update(real(item) for item in symbol.appended)
        made_items = {real(key): real(value) for key, value in symbol.items}
        return {**made, **made_items} if made_items else made
    return symbol


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**2000), max_value=2**2000)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
        | st.sets(st.integers())
        | st.frozensets(st.text())
        | st.binary().map(bytearray)
    ),
    max_leaves=30,
)


@given(value=VALUES, protocol=st.sampled_from(PROTOCOLS))
@settings(max_examples=100, deadline=None)
def test_values_are_what_unpickling_gives(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    found = read(data)
    assert real(found.value) == value
    assert found.end == len(data)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_cyclic_values(protocol: int) -> None:
    inner: list[Any] = []
    inner.append(inner)
    found = read(pickle.dumps([inner, inner], protocol)).value
    assert found[0] is found[1]
    assert found[0][0] is found[0]


def test_every_truncation_is_an_error() -> None:
    data = pickle.dumps({"a": [1, 2.0, "x" * 300], "b": (None, b"y" * 300)}, 2)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            read(data[:length])


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_garbage_is_a_value_or_an_error(data: bytes) -> None:
    with contextlib.suppress(CorruptCheckpointError, UnreadableCheckpointError):
        read(data)


def test_memory_has_a_limit() -> None:
    data = b"\x80\x02" + b"]" * 1_000_000
    with pytest.raises(PickleLimitError, match="bytes"):
        read(data, Limits(memory=10_000_000))


def test_time_has_a_limit() -> None:
    data = b"\x80\x02" + b"N0" * 2_000_000 + b"N."
    with pytest.raises(PickleLimitError, match="longer"):
        read(data, Limits(seconds=0.05, memory=1 << 40))


def test_a_length_past_the_end_takes_no_memory() -> None:
    for code in (b"\x8e", b"\x8d", b"\x96"):
        with pytest.raises(CorruptCheckpointError, match="too early"):
            read(b"\x80\x04" + code + (2**62).to_bytes(8, "little"))


@pytest.mark.parametrize("protocol", PROTOCOLS[1:])
def test_long_strings_and_integers_are_skipped(protocol: int) -> None:
    long = ["k" * 70_000, b"k" * 70_000, 1 << 600_000, "ö" * 40_000]
    found = read(pickle.dumps({**dict.fromkeys(long, 1), "": 2, "after": 3}, protocol))
    *keys, empty, after = [key for key, _ in found.value.items]
    assert (empty, after) == ("", "after")
    elided = [key for key in keys if isinstance(key, Elided)]
    assert len({str(key) for key in elided}) == len(elided) >= 3
    short = pickle.dumps(["k" * 60_000, "l" * 60_000], protocol)
    with pytest.raises(PickleLimitError, match=r"100000 bytes: use torch\.load"):
        read(short, Limits(memory=100_000))


def test_values_nested_a_million_deep() -> None:
    with pytest.raises(PickleLimitError, match="nested"):  # hashing it would end the process
        read(b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".")
    found = read(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    assert type(found.value) is list
