"""Whatever is nested in whatever, over shared storages: stock's bytes, and stock's values."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import loading
from support.corpus import FORMATS, LEGACY_DTYPES, Case, noise
from support.forms import FULL
from support.identity import TARGETS, both, digest, fast, stock

import fastserial
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
    if draw(st.booleans()) and tensor.is_floating_point():
        return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    return tensor


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
