"""What DCP sends between ranks in a save: the metadata, and where each item was written."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from fastserial.distributed.dcp.metadata_file import (
    SentMetadata,
    WriteResults,
    encoded,
    known_of,
    place_of,
)
from fastserial.formats.dcp import Known


def values() -> dict[str, Any]:
    return {"state_dict_metadata": {"a": BytesStorageMetadata()}, "planner_data": {"a": ("a",)}}


def test_metadata_is_sent_as_it_is_in_the_file() -> None:
    metadata = SentMetadata(**values())
    contents = encoded(metadata, sent=True)
    stock = pickle.dumps(Metadata(**values()))
    assert contents.startswith(stock)
    assert stock in pickle.dumps(metadata)
    found = pickle.loads(pickle.dumps(metadata))
    assert type(found) is Metadata
    assert found == Metadata(**values())
    metadata.planner_data = None  # by a storage that is wrapped around ours
    for again in (pickle.loads(pickle.dumps(metadata)), copy.deepcopy(metadata)):
        assert again == Metadata(values()["state_dict_metadata"])


def test_metadata_that_may_change_is_sent_as_it_becomes() -> None:
    metadata = SentMetadata(**values())
    encoded(metadata, sent=False)
    metadata.planner_data = None
    assert metadata == Metadata(values()["state_dict_metadata"])
    text = pickle.dumps(metadata)
    # a storage of stock's pickles it, too
    assert text == pickle.dumps(Metadata(values()["state_dict_metadata"]))
    found = pickle.loads(text)
    assert type(found) is Metadata
    assert found == Metadata(values()["state_dict_metadata"])


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
