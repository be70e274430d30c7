"""What DCP sends between ranks in a save: the metadata, and where each item was written."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from fastserial.distributed import FastStorageWriter
from fastserial.distributed.dcp import deferred_metadata
from fastserial.distributed.dcp.deferred_metadata import deferred, send_as
from fastserial.distributed.dcp.places import known_of, place_of
from fastserial.distributed.dcp.write_results import WriteResults
from fastserial.errors import DistributedError
from fastserial.formats.dcp import Known

READ: list[int] = []


class Step(_DistWrapper):
    """DCP's steps on the coordinator, and, as its result, what another rank gets."""

    def __init__(self) -> None:
        super().__init__(None, False, 0)
        self.use_dist = True

    def gather_object(self, object: Any) -> Any:
        return [object]

    def broadcast_object(self, object: Any) -> Any:
        return pickle.loads(pickle.dumps(object))


class Noted:
    """Notes that it is unpickled."""

    def __reduce__(self) -> Any:
        return note, ()


def note() -> None:
    READ.append(1)


def saved(path: str = "a", **values: Any) -> Metadata:
    place = place_of(f"{path}.distcp", 0, 3, (0, 1, None))
    entries: Any = {path: BytesStorageMetadata()}
    return Metadata(entries, storage_data={MetadataIndex(path): place}, **values)


def sent(metadata: Metadata) -> Any:
    """Return what another rank gets of metadata that is sent as it is."""

    def finish(results: Any) -> Metadata:
        send_as(metadata, pickle.dumps(metadata))
        return metadata

    return Step().all_reduce("write", lambda: None, finish)


def to_send(metadata: Metadata) -> Any:
    """Return metadata as it is on the rank that sends it."""
    found: list[Any] = []

    def finish(results: Any) -> Metadata:
        send_as(metadata, pickle.dumps(metadata))
        found.append(type(metadata))
        return Metadata({})

    Step().all_reduce("write", lambda: None, finish)
    assert found != [Metadata]
    return metadata


LOOKS: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda found: found.planner_data,
    "what it equals": lambda found: found == saved(),
    "what equals it": lambda found: saved() == found,
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "another one": lambda found: dataclasses.replace(found, planner_data="2"),
    "a pickle": lambda found: pickle.loads(pickle.dumps(found)),
    "text": repr,
    "a new value": lambda found: setattr(found, "planner_data", None),
    "its values": vars,
}


@pytest.mark.parametrize("how", [sent, lambda metadata: deferred(lambda: metadata)])
@pytest.mark.parametrize("name", LOOKS)
def test_metadata_is_what_was_sent_or_is_made(name: str, how: Callable[[Metadata], Any]) -> None:
    one, found = saved(planner_data="1"), how(saved(planner_data="1"))
    assert isinstance(found, Metadata)
    assert LOOKS[name](found) == LOOKS[name](one)
    assert type(found) is Metadata
    assert found == one
    assert vars(found) == vars(one)


def test_it_is_unpickled_when_somebody_looks_at_it() -> None:
    READ.clear()
    metadata = saved(planner_data=Noted())
    found = sent(metadata)
    assert isinstance(found, Metadata)
    assert not READ
    assert found.storage_meta is None
    assert list(found.state_dict_metadata) == ["a"]
    assert READ == [1]
    assert type(metadata) is Metadata
    assert isinstance(metadata.planner_data, Noted)


def test_it_is_made_once_and_not_before() -> None:
    def make() -> Metadata:
        made.append(saved())
        return made[-1]

    made: list[Metadata] = []
    found = deferred(make)
    assert isinstance(found, Metadata)
    assert not made
    found.planner_data = "2"
    assert list(found.state_dict_metadata) == ["a"]
    assert len(made) == 1
    assert made[0].planner_data != "2"


@pytest.mark.parametrize("how", [sent, lambda metadata: deferred(lambda: metadata)])
def test_more_of_its_type_is_ordinary_metadata(how: Callable[[Metadata], Any]) -> None:
    found = how(saved())
    made = type(found)(**vars(found))
    assert type(made) is Metadata
    assert made == saved()
    assert type(type(how(saved()))({})) is Metadata


@pytest.mark.parametrize("how", [sent, to_send, lambda metadata: deferred(lambda: metadata)])
def test_an_interrupt_does_not_spoil_it(how: Callable[[Metadata], Any]) -> None:
    lines, first = inspect.getsourcelines(deferred_metadata._unveil)
    stopped = []
    for number in range(first, first + len(lines)):

        def trace(frame: FrameType, event: str, _: Any, number: int = number) -> Any:
            if frame.f_code is not deferred_metadata._unveil.__code__:
                return None
            if event == "line" and frame.f_lineno == number:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        found = how(saved(planner_data="1"))
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            found.planner_data  # noqa: B018
        except KeyboardInterrupt:
            stopped.append(number)
        finally:
            sys.settrace(before)
        assert found.planner_data == "1"
        assert type(found) is Metadata
        assert vars(found) == vars(saved(planner_data="1"))
    assert len(stopped) > 5


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_it_is_made_in_a_forked_child_while_another_thread_makes_one() -> None:
    def make() -> Metadata:
        begun.set()
        end.wait()
        return saved()

    begun, end = threading.Event(), threading.Event()
    slow, other = deferred(make), deferred(saved)
    thread = threading.Thread(target=lambda: slow.planner_data)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        os._exit(0 if other == saved() else 1)
    end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_what_was_changed_is_not_sent_as_it_was() -> None:
    metadata = saved()

    def finish(results: Any) -> Metadata:
        send_as(metadata, pickle.dumps(metadata))
        metadata.state_dict_metadata["b"] = BytesStorageMetadata()
        return metadata

    found = Step().all_reduce("write", lambda: None, finish)
    assert list(found.state_dict_metadata) == ["a", "b"]


def test_metadata_that_is_not_sent_stays_as_it_is(tmp_path: Path) -> None:
    metadata = saved()
    send_as(metadata, b"")
    assert type(metadata) is Metadata

    class Own(FastStorageWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            super().finish(metadata, results)
            kinds.append(type(metadata))

    class Around(FileSystemWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            inner = FastStorageWriter(tmp_path)
            inner.set_up_storage_writer(True)
            inner.finish(metadata, results)
            kinds.append(type(metadata))

    kinds: list[type] = []
    results = [WriteResults([WriteResult(MetadataIndex("a"), 3, place_of("a", 0, 3, None))])]
    for kind, expected in ((Own, True), (Around, True), (FastStorageWriter, False)):
        writer: Any = kind(tmp_path)
        writer.set_up_storage_writer(True)

        def finish_checkpoint(_: Any, writer: Any = writer) -> None:
            metadata = Metadata({})
            writer.finish(metadata, results)
            kinds.append(type(metadata))

        Step().all_reduce("write", lambda: None, finish_checkpoint)
        assert (kinds.pop() is Metadata) == expected
    assert kinds == [Metadata, Metadata]


def test_metadata_that_cannot_be_unpickled_is_an_error() -> None:
    metadata = saved()

    def finish(results: Any) -> Metadata:
        send_as(metadata, b"cfastserial\nno_such_name\n.")
        return metadata

    found = Step().all_reduce("write", lambda: None, finish)
    for _ in range(2):
        with pytest.raises(DistributedError, match="no_such_name"):
            hasattr(found, "planner_data")


def test_results_come_as_they_were() -> None:
    size = torch.Size
    rows = [
        (MetadataIndex("a", size((0, 4)), 3), "__0_0.distcp", Known(8, 7, None)),
        (MetadataIndex("b", size((0, 4)), None), "__0_0.distcp", Known(None, None, (1, 2))),
        (MetadataIndex("c", size(()), 0), "__0_1.distcp", None),
        (MetadataIndex("d"), "__0_1.distcp", Known(0, 1, None)),
    ]
    results = WriteResults(
        WriteResult(index, 10 + number, place_of(file, number, 9, known and tuple(known)))
        for number, (index, file, known) in enumerate(rows)
    )
    found = pickle.loads(pickle.dumps(results))
    assert isinstance(found, list)
    assert found == results
    for one, (index, _, known) in zip(found, rows, strict=True):
        assert one.index.index == index.index
        assert type(one.index.offset) is type(index.offset)
        assert known_of(one.storage_data) == known
    assert found[0].index.offset is found[1].index.offset
    assert pickle.loads(pickle.dumps(WriteResults())) == []


def test_results_with_more_in_them_come_as_they_were() -> None:
    def results(place: Any) -> WriteResults:
        plain = WriteResult(MetadataIndex("a"), 3, place_of("a", 0, 3, None))
        return WriteResults([plain, WriteResult(MetadataIndex("b"), 3, place)])

    noted = place_of("a", 3, 3, (0, 1, None))
    noted.uploaded = "there"
    found = pickle.loads(pickle.dumps(results(noted)))
    assert found[1].storage_data.uploaded == "there"
    assert known_of(found[1].storage_data) == Known(0, 1, None)
    assert pickle.loads(pickle.dumps(results({"a": 1})))[1].storage_data == {"a": 1}
    place: Any = _StorageInfo("a", 3, 3)
    if hasattr(place, "transform_descriptors"):
        place.transform_descriptors = ["zstd"]
        found = pickle.loads(pickle.dumps(results(place)))
        assert found[1].storage_data.transform_descriptors == ["zstd"]
