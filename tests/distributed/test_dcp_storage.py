"""Storage and planners for torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.corpus import aligned, without_crc
from support.damage import flip
from support.limits import file_size_limit
from support.nests import blank, differing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

import fastserial
from fastserial import options
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)
from fastserial.overlap import staging as staging_module
from fastserial.overlap.staging import staging
from fastserial.saving.archive import has_alignment

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),  # that this is one process
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),  # stock's writer
]

MIB = 1 << 20


def save(state: dict[str, Any], writer: Any, planner: Any = None) -> Any:
    return dcp.save(state, storage_writer=writer, planner=planner)


def load(state: dict[str, Any], reader: Any, planner: Any = None) -> dict[str, Any]:
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
        **{f"small {n}": torch.full((37 * n % 3000,), n, dtype=torch.int16) for n in range(300)},
    }


def assert_same(found: Any, expected: Any) -> None:
    assert not differing(found, expected)


def writer_of(who: str, folder: Path) -> Any:
    return FastStorageWriter(folder) if who == "ours" else dcp.FileSystemWriter(folder)


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_rank_writes_the_bytes_of_stock(alignment: int, checksums: bool, tmp_path: Path) -> None:
    state = {key: one for key, one in odd_state().items() if "descriptor" not in key}
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
    small = {"small_file": 0, "block_size": 16384} if planner else {}
    with options(**small):  # blocks cut small tensors
        save(state, writer_of(who, tmp_path), planner and planner())
        for load_planner in (None, FastLoadPlanner()):
            assert_same(load(blank(state), FastStorageReader(tmp_path), load_planner), state)
    report = fastserial.last_load_report()
    assert report is not None
    assert report.verified
    assert_same(load(blank(state), FastStorageReader(tmp_path, verify=False)), state)
    assert_same(load(blank(state), dcp.FileSystemReader(tmp_path), FastLoadPlanner()), state)


@pytest.mark.parametrize("who", ["ours", "stock"])
def test_a_sparse_tensor_is_refused_as_by_stock(who: str, tmp_path: Path) -> None:
    """Stock's reader would leave zeros of it without a word."""
    save({"sparse": torch.eye(4)}, FastStorageWriter(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointException, match=r"Sparse|sparse: its layout is"):
        save({"sparse": torch.eye(4).to_sparse()}, writer_of(who, tmp_path))
    if who == "ours":
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["ours", "stock"])
def test_a_flipped_bit_is_an_error_that_names_item_and_file(who: str, tmp_path: Path) -> None:
    state = {
        "small": torch.arange(100),
        "value": list(range(50)),
        "large": torch.arange(200_000),
        "turned": torch.arange(200_000).view(200, 1000).t(),
    }
    save(state, writer_of(who, tmp_path))
    file = tmp_path / "__0_0.distcp"
    chance = random.Random(who)
    whole = file.read_bytes()
    for index, place in FastStorageReader(tmp_path).read_metadata().storage_data.items():
        value = state[index.fqn]
        data = value.t() if index.fqn == "turned" else value
        text = data.numpy().tobytes() if isinstance(data, torch.Tensor) else b"\x80\x02"
        start = whole.find(text, place.offset)
        for _ in range(4):
            at = start + chance.randrange(max(len(text), 60))
            flip(file, at)
            with pytest.raises(CheckpointException) as caught:
                load(blank(state), FastStorageReader(tmp_path))
            message = str(caught.value)
            assert f"record {index.fqn}" in message
            assert str(file) in message
            flip(file, at)
    for at in range(0, len(whole), len(whole) // 25):  # what is no data may not matter
        flip(file, at)
        found = blank(state)
        try:
            load(found, FastStorageReader(tmp_path))
        except CheckpointException as error:
            assert str(file) in str(error)  # noqa: PT017
        else:
            assert_same(found, state)
        flip(file, at)


def test_a_short_file(tmp_path: Path) -> None:
    save({"a": torch.arange(1000)}, FastStorageWriter(tmp_path))
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
    with file_size_limit(5 * MIB):
        save(state, writer)


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
    with pytest.raises(CheckpointException) as caught:
        fail(state_of(2), FastStorageWriter(tmp_path))
    if fail is disk_full:
        assert str(tmp_path / "__0_1.distcp") in str(caught.value)
        assert "ulimit -f" in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save(state_of(3), FastStorageWriter(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".metadata", "__0_1.distcp"]
    assert_same(load(state_of(0), FastStorageReader(tmp_path)), state_of(3))


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


def test_overwrite_may_be_refused(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, FastStorageWriter(tmp_path / "new" / "folder", overwrite=False))
    with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
        save({"a": torch.ones(3)}, FastStorageWriter(tmp_path / "new" / "folder", overwrite=False))
    (failure,) = caught.value.failures.values()
    assert getattr(failure[0], "errno", None) == errno.EEXIST


def test_another_dtype_and_keys_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, FastStorageWriter(tmp_path))
    half = {"a": torch.zeros(3, dtype=torch.float16)}
    assert_same(load(half, FastStorageReader(tmp_path)), {"a": torch.ones(3).half()})
    for planner in (None, FastLoadPlanner()):
        with pytest.raises(CheckpointException, match="Missing key"):
            load({"b": torch.ones(3)}, FastStorageReader(tmp_path), planner)
        with pytest.raises(CheckpointException, match="Size mismatch"):
            load({"a": torch.ones(4)}, FastStorageReader(tmp_path), planner)
    partial = FastLoadPlanner(allow_partial_load=True)
    found = load({"a": torch.zeros(3), "b": torch.zeros(2)}, FastStorageReader(tmp_path), partial)
    assert_same(found, {"a": torch.ones(3), "b": torch.zeros(2)})


def test_what_went_through_extensions_of_stock(tmp_path: Path) -> None:
    """The file has other bytes then, which only the extension can read."""
    utils = pytest.importorskip("torch.testing._internal.distributed.checkpoint_utils")
    if not hasattr(utils, "Rot13Example"):
        pytest.skip("Rot13Example is missing: torch before 2.7 has no extensions")
    state = {"a": torch.arange(500_000), "b": "text"}
    save(state, dcp.FileSystemWriter(tmp_path, _extensions=[utils.Rot13Example()]))
    reader = FastStorageReader(tmp_path, _extension_registry=utils.get_test_extension_registry())
    assert_same(load(blank(state), reader), state)


class Attributes(dict[str, Any]):
    """Keys are attributes: `copy` finds none of its own methods there."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Uncopied(dict[str, Any]):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not to be copied")


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_snapshot_copies_what_deepcopy_does_not(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    state = {
        "w": parameter,
        "attributes": Attributes(t=torch.ones(2), again=parameter),
        "uncopied": Uncopied(t=(torch.ones(2) * parameter[0],)),
        "object": Holder(parameter),
    }
    found = FastStorageWriter(tmp_path).stage(state)
    with torch.no_grad():
        parameter.zero_()
    assert not differing(found["attributes"], {"t": torch.ones(2), "again": torch.ones(3)})
    assert found["attributes"]["again"] is found["w"]
    assert not differing(found["uncopied"]["t"][0], torch.ones(2))
    held = found["object"].held
    assert isinstance(held, torch.nn.Parameter)
    assert held.requires_grad
    assert held.tolist() == [1, 1, 1]


def parts_of(state: Any) -> dict[str, Any]:
    whole = torch.arange(24.0).reshape(4, 6)
    return {
        "rows": whole, "column": whole[:, 1], "turned": whole.t(), "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3), "half": whole.half(), "conj": torch.ones(3) * 1j, "text": "x",
        "large": torch.arange(500_000), "bits": torch.tensor([True, False]), **state,
    }  # fmt: skip


def test_a_snapshot_is_in_the_memory_of_background_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used again when the copies are gone; what finds no room is copied by torch."""
    writer, state = FastStorageWriter(tmp_path), parts_of({"flipped": torch.ones(3).mul(1j).conj()})
    used = staging.in_use
    for _ in range(3):
        found = writer.stage(state)
        assert_same(found, state)
        for key in ("rows", "turned", "scalar", "large"):
            assert found[key].stride() == state[key].stride()
            assert found[key].data_ptr() != state[key].data_ptr()
        assert staging.in_use - used >= 4_000_000
        large = found.pop("large")
        del found
        assert staging.in_use > used
        assert torch.equal(large, state["large"])
        held = staging.held
        del large
        assert staging.in_use == used
        assert staging.held == held
    monkeypatch.setattr(staging_module, "available_bytes", lambda: 1000)
    found = writer.stage(state)
    assert staging.in_use == used
    assert_same(found, state)


# -- planners --------------------------------------------------------------------------------------


def test_a_cached_plan_stays_as_it_is(tmp_path: Path) -> None:
    """What a program does to the metadata that `dcp.save` returns is not in the next save."""
    state = {"a": torch.arange(10.0), "b": torch.ones(3)}
    for index in range(3):
        metadata = save(state, FastStorageWriter(tmp_path / str(index)), FastSavePlanner())
        assert sorted(metadata.state_dict_metadata) == ["a", "b"]
        entry = metadata.state_dict_metadata.pop("b")
        entry.properties.dtype = torch.bfloat16
        entry.chunks.pop().sizes = torch.Size((1,))
        del metadata.state_dict_metadata["a"]
        metadata.planner_data.clear()
        reader = FastStorageReader(tmp_path / str(index))
        entry = reader.read_metadata().state_dict_metadata["b"]
        assert (entry.properties.dtype, entry.chunks[0].sizes) == (torch.float32, (3,))
        assert_same(load(blank(state), reader), state)


class HalfLocal:
    """Saves a tensor in another type, and says so: as in torch's documentation."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)  # type: ignore[misc]
        return found.half() if write_item.index.fqn == "a" else found

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()  # type: ignore[misc]
        for item in plan.items:
            if item.index.fqn == "a" and item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan


class HalfLooked:
    """Without a word of it."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)  # type: ignore[misc]
        return found.half() if index.fqn == "a" else found


@pytest.mark.parametrize("change", [HalfLocal, HalfLooked])
def test_a_planner_that_changes_plans_gets_those_of_torch(change: Any, tmp_path: Path) -> None:
    state = {"a": torch.arange(4).bfloat16(), "b": torch.ones(4).bfloat16()}
    saved: list[Any] = []
    for number, base in enumerate((DefaultSavePlanner, FastSavePlanner)):
        planner = type("Changing", (change, base), {})
        folder = tmp_path / str(number)
        for _ in range(2):
            ours = pytest.warns(UserWarning, match="Changing changes plans")
            with ours if base is FastSavePlanner else nullcontext():
                made = planner()
            save(state, FastStorageWriter(folder), made)
        saved.append(FastStorageReader(folder).read_metadata().state_dict_metadata)
        for reader in (FastStorageReader(folder), dcp.FileSystemReader(folder)):
            found = load({key: torch.zeros(4) for key in state}, reader)
            assert_same(found, {key: one.float() for key, one in state.items()})
    assert saved[0] == saved[1]
    said = torch.float16 if change is HalfLocal else torch.bfloat16
    assert saved[1]["a"].properties.dtype == said
    assert saved[1]["b"].properties.dtype == torch.bfloat16


def planner_of(kind: type[DefaultSavePlanner]) -> DefaultSavePlanner:
    planner = kind(flatten_state_dict=False)  # else torch itself cannot merge the plans
    planner.set_up_planner({"a": torch.ones(3)}, StorageMeta(), True)
    return planner


def test_ranks_with_planners_of_two_kinds_are_an_error() -> None:
    """Else what some of them have would not be saved."""

    class Changing(HalfLocal, FastSavePlanner):
        pass

    for other in (DefaultSavePlanner, Changing):
        warned = pytest.warns(UserWarning, match="Changing changes plans")
        with warned if other is Changing else nullcontext():
            coordinator = planner_of(other)
        ours, plan = planner_of(FastSavePlanner), coordinator.create_local_plan()
        with pytest.raises(ValueError, match=r"rank 0.* has another kind of planner"):
            ours.create_global_plan([plan])
        told = ours.create_local_plan()
        if other is Changing:
            with pytest.raises(ValueError, match=r"rank 1.* has another kind of planner"):
                coordinator.create_global_plan([plan, told])
        else:
            plans, _ = coordinator.create_global_plan([plan, told])
            with pytest.raises(ValueError, match="the coordinator has another kind of planner"):
                ours.finish_plan(plans[1])


def test_saves_of_several_threads_at_once(tmp_path: Path) -> None:
    """Each goes by its own plan."""
    start = threading.Barrier(3, timeout=60)

    def work(number: int) -> None:
        folder = tmp_path / str(number)
        for size in (1 + number, 2, 1 + number, 2, 2, 1 + number) * 2:
            start.wait()
            state = {"a": torch.full((size,), float(number)), "b": number}
            save(state, FastStorageWriter(folder), FastSavePlanner())
            assert_same(load(blank(state), FastStorageReader(folder)), state)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
