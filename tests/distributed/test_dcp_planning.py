"""What plans are made of: flattened states, and what tells them apart."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.nests import differing
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from fastserial.distributed import FastSavePlanner, FastStorageReader, FastStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_a_cached_plan_stays_as_it_is(tmp_path: Path) -> None:
    """What a program does to the metadata that `dcp.save` returns is not in the next save."""
    state = {"a": torch.arange(10.0), "b": torch.ones(3)}
    for index in range(3):
        writer = FastStorageWriter(tmp_path / str(index))
        metadata = dcp.save(state, storage_writer=writer, planner=FastSavePlanner())
        assert sorted(metadata.state_dict_metadata) == ["a", "b"]
        entry = metadata.state_dict_metadata.pop("b")
        entry.properties.dtype = torch.bfloat16
        entry.chunks.pop().sizes = torch.Size((1,))
        del metadata.state_dict_metadata["a"]
        metadata.planner_data.clear()
        reader = FastStorageReader(tmp_path / str(index))
        entry = reader.read_metadata().state_dict_metadata["b"]
        assert (entry.properties.dtype, entry.chunks[0].sizes) == (torch.float32, (3,))
        found = {"a": torch.zeros(10), "b": torch.zeros(3)}
        dcp.load(found, storage_reader=reader)
        assert all(torch.equal(found[key], state[key]) for key in state)


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
            with ours if base is FastSavePlanner else contextlib.nullcontext():
                made = planner()
            writer = FastStorageWriter(folder)
            dcp.save(state, storage_writer=writer, planner=made)
        saved.append(FastStorageReader(folder).read_metadata().state_dict_metadata)
        readers: list[Any] = [FastStorageReader(folder), dcp.FileSystemReader(folder)]
        for reader in readers:
            found = {key: torch.zeros(4) for key in state}
            dcp.load(found, storage_reader=reader)
            assert all(torch.equal(found[key], state[key].float()) for key in state)
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
        with warned if other is Changing else contextlib.nullcontext():
            coordinator = planner_of(other)
        ours, plan = planner_of(FastSavePlanner), coordinator.create_local_plan()
        with pytest.raises(ValueError, match="rank 0 has another kind of planner"):
            ours.create_global_plan([plan])
        told = ours.create_local_plan()
        if other is Changing:
            with pytest.raises(ValueError, match="rank 1 has another kind of planner"):
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
            dcp.save(state, storage_writer=FastStorageWriter(folder), planner=FastSavePlanner())
            found: Any = {"a": torch.zeros(size), "b": -1}
            dcp.load(found, storage_reader=FastStorageReader(folder))
            assert not differing(found, state)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
