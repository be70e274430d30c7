"""The storage for torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.corpus import aligned, without_crc
from support.damage import flip
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import fastserial
from fastserial import options
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)
from fastserial.saving.archive import has_alignment

MIB = 1 << 20


def save(state: dict[str, Any], writer: Any, planner: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(state, storage_writer=writer, planner=planner)


def load(state: dict[str, Any], reader: Any, planner: Any = None) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, planner=planner)
    return state


def looks_like_zip(count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"PK\7\x08abcd" * count), dtype=torch.uint8)


def odd_state() -> dict[str, Any]:
    """Tensors of every kind of memory, and values."""
    torch.manual_seed(0)
    return {
        "small": torch.randn(10, 3),
        "large": torch.randn(1500, 1000),
        "value": 3,
        "nest": {"list": [1, "x", {"y": None}], "tensor": torch.arange(5)},
        "part of a storage": torch.randn(100, 100)[10:20],
        "transposed": torch.randn(300, 200).t(),
        "strided": torch.randn(900, 1100)[::2, 1::3],
        "strided and transposed": torch.randn(300, 400, dtype=torch.complex128)[::2, ::2].t(),
        "channels last": torch.randn(64, 32, 5, 7).to(memory_format=torch.channels_last),
        "no dimension": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "bfloat16": torch.randn(400, 400).bfloat16(),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(5, 5, dtype=torch.complex64),
        "conjugated": torch.randn(5, 5, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "expanded": torch.ones(1).expand(4),
        "descriptor": looks_like_zip(20),
        "large descriptor": looks_like_zip(200_000),
        "bytes": b"x" * 100_000,
    }


def blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype).zero_()
    return None


def assert_same(found: Any, expected: Any, key: str = "") -> None:
    if isinstance(expected, dict):
        for name in expected:
            assert_same(found[name], expected[name], f"{key}.{name}")
    elif isinstance(expected, torch.Tensor):
        a, b = (
            x.resolve_conj().contiguous().flatten().view(torch.uint8) for x in (found, expected)
        )
        assert torch.equal(a, b), key
    else:
        assert found == expected, key


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_rank_writes_the_bytes_of_stock(alignment: int, checksums: bool, tmp_path: Path) -> None:
    state = odd_state()
    if alignment != 64 and not has_alignment():
        pytest.skip("torch.utils.serialization.config is missing: no other alignment")
    with (
        aligned(alignment) if alignment != 64 else nullcontext(),
        nullcontext() if checksums else without_crc(),
    ):
        save(state, FastStorageWriter(tmp_path / "ours"))
        save(state, dcp.FileSystemWriter(tmp_path / "stock"))
    ours, stock = (tmp_path / who / "__0_0.distcp" for who in ("ours", "stock"))
    assert ours.read_bytes() == stock.read_bytes()
    a, b = (dcp.FileSystemReader(tmp_path / who).read_metadata() for who in ("ours", "stock"))
    assert a.state_dict_metadata == b.state_dict_metadata
    assert a.planner_data == b.planner_data
    if hasattr(b, "version"):  # since torch 2.7
        assert a.version == b.version
    places = [{k: (p.offset, p.length) for k, p in m.storage_data.items()} for m in (a, b)]
    assert places[0] == places[1]


@pytest.mark.parametrize("planner", [None, FastSavePlanner])
@pytest.mark.parametrize("who", ["ours", "stock"])
def test_what_was_saved_is_loaded(who: str, planner: Any, tmp_path: Path) -> None:
    state = odd_state()
    writer: Any = dcp.FileSystemWriter(tmp_path)
    if who != "stock":
        writer = FastStorageWriter(tmp_path)
    save(state, writer, planner and planner())
    for load_planner in (None, FastLoadPlanner()):
        assert_same(load(blank(state), FastStorageReader(tmp_path), load_planner), state)
    report = fastserial.last_load_report()
    assert report is not None
    assert report.verified
    assert_same(load(blank(state), FastStorageReader(tmp_path, verify=False)), state)
    assert_same(load(blank(state), dcp.FileSystemReader(tmp_path), FastLoadPlanner()), state)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FastStorageWriter])
def test_a_sparse_tensor_is_refused_as_by_stock(
    writer: Any, layout: torch.layout, tmp_path: Path
) -> None:
    """Stock's reader would leave zeros of it without a word."""
    save({"sparse": torch.eye(4)}, FastStorageWriter(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save({"sparse": torch.eye(4).to_sparse(layout=layout)}, writer(tmp_path))
    assert "Sparse" in str(caught.value) or "sparse: its layout is" in str(caught.value)
    if writer is FastStorageWriter:
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("small_file", [0, 8 * MIB])
def test_small_tensors_that_blocks_cut(small_file: int, tmp_path: Path) -> None:
    chance = random.Random(5)
    state = {
        f"{index}": torch.full((chance.randrange(3000),), index, dtype=torch.int16)
        for index in range(2500)
    }
    with options(small_file=small_file, block_size=16384):
        save(state, FastStorageWriter(tmp_path))
        assert_same(load(blank(state), FastStorageReader(tmp_path)), state)
    assert_same(load(blank(state), dcp.FileSystemReader(tmp_path)), state)


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["ours", "stock"])
def test_a_flipped_bit_is_an_error_that_names_item_and_file(who: str, tmp_path: Path) -> None:
    state = {
        "small": torch.arange(100),
        "value": list(range(50)),
        "large": torch.arange(400_000),
        "turned": torch.arange(400_000).view(200, 2000).t(),
    }
    writer: Any = dcp.FileSystemWriter(tmp_path)
    if who != "stock":
        writer = FastStorageWriter(tmp_path)
    save(state, writer)
    file = tmp_path / "__0_0.distcp"
    chance = random.Random(who)
    whole = file.read_bytes()
    for index, place in FastStorageReader(tmp_path).read_metadata().storage_data.items():
        value = state[index.fqn]
        data = value.t() if index.fqn == "turned" else value
        text = data.numpy().tobytes() if isinstance(data, torch.Tensor) else b"\x80\x02"
        start = whole.find(text, place.offset)
        for _ in range(6):
            at = start + chance.randrange(max(len(text), 60))
            flip(file, at)
            with pytest.raises(CheckpointException) as caught:
                load(blank(state), FastStorageReader(tmp_path))
            message = str(caught.value)
            assert f"record {index.fqn}" in message
            assert str(file) in message
            flip(file, at)
    assert_same(load(blank(state), FastStorageReader(tmp_path)), state)


@pytest.mark.parametrize("who", ["ours", "stock"])
def test_no_flipped_bit_gives_other_values(who: str, tmp_path: Path) -> None:
    state = {"a": torch.arange(10), "b": torch.arange(20.0).view(4, 5).t(), "c": "text"}
    writer: Any = dcp.FileSystemWriter(tmp_path)
    if who != "stock":
        writer = FastStorageWriter(tmp_path)
    save(state, writer)
    file = tmp_path / "__0_0.distcp"
    errors = 0
    for at in range(0, file.stat().st_size, 7):
        flip(file, at)
        found = blank(state)
        try:
            load(found, FastStorageReader(tmp_path))
        except CheckpointException as error:
            assert str(file) in str(error)  # noqa: PT017
            errors += 1
        else:
            assert_same(found, state)
        flip(file, at)
    assert errors


def test_a_damaged_or_short_file(tmp_path: Path) -> None:
    save({"a": torch.arange(1000)}, FastStorageWriter(tmp_path))
    flip(tmp_path / ".metadata", 100)
    with pytest.raises(CheckpointException, match="its CRC-32 is"):
        load({"a": torch.zeros(1000)}, FastStorageReader(tmp_path))
    flip(tmp_path / ".metadata", 100)
    os.truncate(tmp_path / "__0_0.distcp", 1000)
    with pytest.raises(CheckpointException, match="ends before"):
        load({"a": torch.zeros(1000, dtype=torch.int64)}, FastStorageReader(tmp_path))


# -- one checkpoint after the other ----------------------------------------------------------------


def failing(at: str) -> DefaultSavePlanner:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == at:
                raise ArithmeticError("not today")
            return super().resolve_data(write_item)

    return Failing()


def disk_full(state: dict[str, Any], writer: Any) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * MIB, limit[1]))
    try:
        save(state, writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def planner_fails(state: dict[str, Any], writer: Any) -> None:
    save(state, writer, failing("b"))


@pytest.mark.parametrize("fail", [disk_full, planner_fails])
def test_a_failed_save_leaves_the_old_checkpoint(
    fail: Callable[[dict[str, Any], Any], None], tmp_path: Path
) -> None:
    def state_of(step: int) -> dict[str, Any]:
        return {"a": torch.full((MIB,), step), "b": torch.full((MIB,), step)}

    save(state_of(1), FastStorageWriter(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointException):
        fail(state_of(2), FastStorageWriter(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save(state_of(3), FastStorageWriter(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".metadata", "__0_1.distcp"]
    assert_same(load(state_of(0), FastStorageReader(tmp_path)), state_of(3))


def test_an_error_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        disk_full({"a": torch.zeros(2 * MIB)}, FastStorageWriter(tmp_path))
    assert str(tmp_path / "__0_0.distcp") in str(caught.value)
    assert "ulimit -f" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    others = ("notes.txt", "__0_0.distcp.bak", "__0_\N{ARABIC-INDIC DIGIT ONE}.distcp")
    for name in ("__0_7.distcp", "__12_0.distcp", *others):
        (tmp_path / name).write_text("x")
    (tmp_path / "__3.metadata").mkdir()
    os.mkfifo(tmp_path / "__4.metadata")
    save({"a": torch.ones(3)}, FastStorageWriter(tmp_path))
    save({"a": torch.ones(4)}, FastStorageWriter(tmp_path))
    expected = sorted([".metadata", "__0_1.distcp", "__3.metadata", "__4.metadata", *others])
    assert sorted(os.listdir(tmp_path)) == expected


def test_where_it_cannot_be_told_what_is_needed_nothing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "__0_7.distcp").write_text("x")
    (tmp_path / "__3.metadata").symlink_to(tmp_path / "elsewhere")
    state = {"a": torch.ones(3)}
    save(state, FastStorageWriter(tmp_path))
    assert_same(load(blank(state), FastStorageReader(tmp_path)), state)
    assert sorted(os.listdir(tmp_path)) == [
        ".metadata",
        "__0_0.distcp",
        "__0_7.distcp",
        "__3.metadata",
    ]


def test_overwrite_may_be_refused(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, FastStorageWriter(tmp_path / "new" / "folder", overwrite=False))
    with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
        save({"a": torch.ones(3)}, FastStorageWriter(tmp_path / "new" / "folder", overwrite=False))
    (failure,) = caught.value.failures.values()
    assert getattr(failure[0], "errno", None) == errno.EEXIST


def test_checkpoints_of_ranks_on_their_own(tmp_path: Path) -> None:
    """`use_collectives=False`, since torch 2.8."""
    state = {"a": torch.arange(5000), "b": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(state, storage_writer=FastStorageWriter(tmp_path), use_collectives=False)
        except TypeError:
            pytest.skip("dcp.save of this torch has no use_collectives")
    assert sorted(os.listdir(tmp_path)) == ["__0.metadata", "__0_0.distcp"]
    assert_same(load(blank(state), FastStorageReader(tmp_path)), state)
    assert_same(load(blank(state), dcp.FileSystemReader(tmp_path)), state)


def test_a_planner_that_makes_copies(tmp_path: Path) -> None:
    class Half(DefaultSavePlanner):
        alive = 0

        def transform_object(self, write_item: Any, object: Any) -> Any:
            if isinstance(object, torch.Tensor):
                return object.bfloat16()
            return super().transform_object(write_item, object)

    state = {f"{index}": torch.full((3 * MIB,), float(index)) for index in range(8)} | {"x": 1}
    save(state, FastStorageWriter(tmp_path / "ours"), Half())
    save(state, dcp.FileSystemWriter(tmp_path / "stock"), Half())
    files = [(tmp_path / who / "__0_0.distcp").read_bytes() for who in ("ours", "stock")]
    assert files[0] == files[1]
    for who in ("ours", "stock"):
        assert_same(load(blank(state), FastStorageReader(tmp_path / who)), state)


def test_loading_into_another_dtype(tmp_path: Path) -> None:
    state = {"small": torch.randn(100), "large": torch.randn(700, 1000)}
    save(state, FastStorageWriter(tmp_path))
    found = load({key: torch.zeros_like(x).half() for key, x in state.items()},
                 FastStorageReader(tmp_path))  # fmt: skip
    assert_same(found, {key: x.half() for key, x in state.items()})


def test_keys_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, FastStorageWriter(tmp_path))
    for planner in (None, FastLoadPlanner()):
        with pytest.raises(CheckpointException, match="Missing key"):
            load({"b": torch.ones(3)}, FastStorageReader(tmp_path), planner)
        with pytest.raises(CheckpointException, match="Size mismatch"):
            load({"a": torch.ones(4)}, FastStorageReader(tmp_path), planner)
    partial = FastLoadPlanner(allow_partial_load=True)
    found = load({"a": torch.zeros(3), "b": torch.zeros(2)}, FastStorageReader(tmp_path), partial)
    assert_same(found, {"a": torch.ones(3), "b": torch.zeros(2)})


def test_the_tools_of_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = {"a": torch.arange(5000), "b": [1, {"c": torch.ones(2)}]}
    save(state, FastStorageWriter(tmp_path / "dcp"), FastSavePlanner())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=False)
    assert torch.equal(found["a"], state["a"])
    assert torch.equal(found["b"][1]["c"], torch.ones(2))


def test_what_went_through_extensions_of_stock(tmp_path: Path) -> None:
    """The file has other bytes then, which only the extension can read."""
    utils = pytest.importorskip("torch.testing._internal.distributed.checkpoint_utils")
    if not hasattr(utils, "Rot13Example"):
        pytest.skip("Rot13Example is missing: torch before 2.7 has no extensions")
    state = {"a": torch.arange(500_000), "b": "text"}
    save(state, dcp.FileSystemWriter(tmp_path, _extensions=[utils.Rot13Example()]))
    reader = FastStorageReader(tmp_path, _extension_registry=utils.get_test_extension_registry())
    assert_same(load(blank(state), reader), state)


def test_importing_distributed_does_not_import_dcp() -> None:
    code = (
        "import sys, fastserial.distributed as d; d.save; "
        "assert 'fastserial.distributed.dcp' not in sys.modules; "
        "d.FastStorageWriter; assert 'fastserial.distributed.dcp' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
